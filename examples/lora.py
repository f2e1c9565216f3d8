"""Fine-tunes a published language model: low-rank adapters of its attention, on packed text.

    python examples/lora.py path/to/model --text notes/ --steps 200
    python examples/lora.py path/to/model --text notes/ --steps 400    # goes on
    python examples/lora.py path/to/model --text notes/ --steps 400 --prompt "The"  # and writes

The model is a directory as for `pretrained_decoder.py`, with a tokenizer. Each file is a document.
Documents are packed into rows, and `Segments` keeps them apart. Only the adapters are trained; the
checkpoint in --out holds them and the optimiser, and `loss.png` draws the losses.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _text import read_documents
from pretrained.checkpoint import load
from pretrained.decoder import Decoder
from pretrained.generation import generate
from pretrained.lora import adapt, merge, pack, packed_loss, split
from tokenizers import Tokenizer
from tqdm import tqdm


@dataclasses.dataclass(frozen=True)
class Options:
    """What determines the result of a run. A checkpoint holds it."""

    rank: int = 8
    scale: float = 2.0
    row: int = 256
    batch: int = 4
    lr: float = 1e-3
    seed: int = 0
    dtype: str = "float32"


HELP = {
    "rank": "rank of the adapters",
    "scale": "factor on what they add",
    "row": "tokens of a packed row",
    "batch": "rows of a step",
    "lr": "learning rate",
    "seed": "of adapters and batches",
    "dtype": "of the model",
}


def read_rows(folder: Path, text: Path | None, options: Options) -> tuple[Any, Any]:
    """Packed rows to train on, and every twentieth, which is held out.

    **Raises:** `ValueError` if there is no tokenizer or too little text.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ValueError(f"{path} does not exist: it makes tokens of the text.")
    tokenizer = Tokenizer.from_file(str(path))
    documents = (tokenizer.encode(x.decode()).ids for x in read_documents(text))
    packed = pack(documents, options.row)
    held_out = np.arange(len(packed[0])) % 20 == 19
    if held_out.sum() < 1 or (~held_out).sum() < options.batch:
        raise ValueError(f"{len(packed[0])} rows of {options.row} tokens are too few: at least 20.")
    return tuple(x[~held_out] for x in packed), tuple(x[held_out] for x in packed)


def save(path: Path, header: dict[str, Any], state: Any) -> None:
    """A line of JSON, then the arrays; it replaces the old file at once."""
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        file.write(json.dumps(header).encode() + b"\n")
        eqx.tree_serialise_leaves(file, state)
    os.replace(partial, path)


def restore(path: Path, wanted: dict[str, Any], state: Any) -> tuple[list[float], list[Any], Any]:
    """The losses so far, the held-out losses and the state.

    **Raises:** `ValueError` if the checkpoint is of other options.
    """
    with open(path, "rb") as file:
        header = json.loads(file.readline())
        differing = {k: (header["run"].get(k), x) for k, x in wanted.items()}
        differing = {k: x for k, x in differing.items() if x[0] != x[1]}
        if differing:
            raise ValueError(f"{path} is of another run: {differing}; give another --out.")
        return header["losses"], header["held_out"], eqx.tree_deserialise_leaves(file, state)


def draw(path: Path, losses: list[float], held_out: list[Any]) -> None:
    from matplotlib.figure import Figure  # without pyplot it needs no display

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss per token")
    axes.plot(np.arange(1, len(losses) + 1), losses, color="C0", alpha=0.5, label="training")
    axes.plot(*np.array(held_out).T, "o-", color="C1", label="held out")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def train(
    model: Decoder, rows: tuple[Any, Any], options: Options, steps: int, out: Path, run: dict
) -> tuple[Decoder, list[float], list[Any]]:
    """Trains up to `steps` in all, from the checkpoint if there is one.

    **Returns:** the model with its adapters merged, the loss of each step, and the losses
    `[step, loss]` of what is held out.
    """
    training, held_out = rows
    adapted = adapt(model, options.rank, options.scale, jax.random.key(options.seed))
    adapters, frozen = split(adapted)
    optimiser = optax.adamw(options.lr, weight_decay=0.0)
    state, losses, evaluated = (adapters, optimiser.init(adapters)), [], []
    path = out / "adapters.eqx"
    if path.exists():
        losses, evaluated, state = restore(path, run, state)
        print(f"continuing {path} after step {len(losses)}")

    def loss(adapters, frozen, packed):
        return packed_loss(eqx.combine(adapters, frozen), packed)

    @eqx.filter_jit
    def step(state, frozen, packed):
        adapters, moments = state
        value, gradient = jax.value_and_grad(loss)(adapters, frozen, packed)
        updates, moments = optimiser.update(gradient, moments, adapters)
        return (optax.apply_updates(adapters, updates), moments), value

    evaluate = eqx.filter_jit(loss)

    def held_out_loss() -> float:
        chunks = [
            tuple(x[i : i + options.batch] for x in held_out)
            for i in range(0, len(held_out[0]) - options.batch + 1, options.batch)
        ] or [held_out]
        return float(np.mean([evaluate(state[0], frozen, chunk) for chunk in chunks]))

    every = max(1, steps // 10)
    for done in tqdm(range(len(losses), steps), unit="step", initial=len(losses), total=steps):
        if not evaluated:
            evaluated.append([0, held_out_loss()])
        # The batch is a function of seed and step, so that a run that goes on is the same run.
        chosen = np.random.default_rng((options.seed, done)).integers(
            len(training[0]), size=options.batch
        )
        state, value = step(state, frozen, tuple(x[chosen] for x in training))
        losses.append(float(value))
        if (done + 1) % every == 0 or done + 1 == steps:
            evaluated.append([done + 1, held_out_loss()])
            tqdm.write(f"step {done + 1}: held-out loss {evaluated[-1][1]:.3f}", file=sys.stdout)
            save(path, dict(run=run, losses=losses, held_out=evaluated), state)
    return merge(eqx.combine(state[0], frozen)), losses, evaluated


def main(argv: Sequence[str] | None = None) -> int:
    """The program. **Returns:** its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", type=Path, help="folder of the model")
    add("--text", type=Path, help="a file or folder (default: Python's standard library)")
    add("--out", type=Path, default=Path("runs/lora"), help="folder of the results")
    add("--steps", type=int, default=200, help="steps in all (default %(default)s)")
    add("--prompt", help="print 40 tokens after this text, by the model with its adapters")
    for field in dataclasses.fields(Options):
        flag, kind = f"--{field.name}", type(field.default)
        add(flag, type=kind, default=field.default, help=f"{HELP[field.name]} (%(default)s)")
    given = parser.parse_args(argv)
    options = Options(
        **{field.name: getattr(given, field.name) for field in dataclasses.fields(Options)}
    )
    try:
        model, _ = load(given.model, jnp.dtype(options.dtype))
        rows = read_rows(given.model, given.text, options)
        given.out.mkdir(parents=True, exist_ok=True)
        size = sum(
            x.size
            for x in jax.tree.leaves(split(adapt(model, options.rank, 1.0, jax.random.key(0)))[0])
        )
        used = float(np.mean(rows[0][2] >= 0))
        print(
            f"{len(rows[0][0])} rows of {options.row} tokens, {used:.0%} used; {size:,} parameters"
        )
        run = dataclasses.asdict(options) | dict(model=str(given.model), text=str(given.text))
        merged, losses, held_out = train(model, rows, options, given.steps, given.out, run)
        if given.prompt:
            tokenizer = Tokenizer.from_file(str(given.model / "tokenizer.json"))
            prompt = tokenizer.encode(given.prompt).ids
            new = [x for (x,) in generate(merged, [prompt], 40) if x is not None]
            print(tokenizer.decode(prompt + new))
    except ValueError as error:
        parser.error(str(error))
    if losses:
        draw(given.out / "loss.png", losses, held_out)
        print(f"held-out loss {held_out[0][1]:.3f} before, {held_out[-1][1]:.3f} after")
    return 0


if __name__ == "__main__":
    sys.exit(main())
