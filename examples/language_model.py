"""Trains a byte-level GPT-style language model with `eqattn.attention` in every layer.

    python examples/language_model.py                   # about 4 minutes on 2 CPU cores
    python examples/language_model.py --text PATH       # your own text, a file or a folder
    python examples/language_model.py --context 16384 --memory-report

The text is the source of Python's standard library as found on this machine; nothing is
downloaded. Whole files are held out, and how well they are predicted is given in bits per byte.

The folder --out gets checkpoint.eqx and loss.png. Ctrl-C and SIGTERM finish the step, save and
exit. If --out holds a checkpoint, the run continues from it as if it had never stopped, with the
same bytes in the same order, and options not given are the checkpoint's. --resume insists on
that, --fresh starts over.
"""

import argparse
import dataclasses
import hashlib
import math
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _model import bits_per_byte, cast, LanguageModel
from _run import caught_signals, Config, draw, load, make_parser, Progress, resolve, save
from _text import read_documents, split, windows_at
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt8
from tqdm import tqdm

from eqattn import AttentionMetadata, AttentionRegistry


# Training --------------------------------------------------------------------------------------


class State(eqx.Module):
    """What a step changes."""

    model: LanguageModel
    optimiser: optax.OptState


@eqx.filter_jit
def create_state(config: Config) -> State:
    """The state before the first step."""
    model = LanguageModel(config, jax.random.key(config.seed))
    return State(model, make_optimiser(config).init(model))


def make_strategy(config: Config) -> Any:
    """The strategy of a registry name. **Raises:** `ValueError` listing the names."""
    metadata = AttentionMetadata(runtime_dtype=jnp.dtype(config.dtype))
    return AttentionRegistry.create(config.strategy, metadata)


def make_optimiser(config: Config) -> optax.GradientTransformation:
    """AdamW with clipping, a linear warm-up and a cosine decay to a tenth."""
    warmup = min(100, config.steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(
        config.lr / 100, config.lr, warmup, config.steps, config.lr / 10
    )
    matrices = lambda parameters: jax.tree.map(lambda leaf: leaf.ndim > 1, parameters)
    adamw = optax.adamw(schedule, b2=0.99, weight_decay=0.1, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def compile_step(config: Config, strategy: Any, state: State) -> Any:
    """`step(windows, state) -> (state, bits per byte)`, compiled. It consumes the old state."""
    optimiser = make_optimiser(config)

    @eqx.filter_jit(donate="all-except-first")
    def step(windows: UInt8[Array, "n context+1"], state: State) -> tuple[State, Float[Array, ""]]:
        loss, gradients = eqx.filter_value_and_grad(bits_per_byte)(
            state.model, windows, strategy, config.dtype
        )
        updates, moments = optimiser.update(gradients, state.optimiser, state.model)
        return State(eqx.apply_updates(state.model, updates), moments), loss

    return step.lower(np.zeros((config.batch, config.context + 1), np.uint8), state).compile()


def make_evaluation(
    config: Config, strategy: Any, text: UInt8[np.ndarray, "n"]
) -> Callable[[LanguageModel], float]:
    """The mean bits per byte of windows spread evenly over the held-out text."""
    batches = math.ceil(config.eval_bytes / (config.context * config.batch))
    last = len(text) - config.context - 1
    starts = np.linspace(0, last, batches * config.batch).astype(int).reshape(batches, -1)
    loss = eqx.filter_jit(bits_per_byte)

    def evaluate(model: LanguageModel) -> float:
        windows = (windows_at(text, row, config.context) for row in starts)
        return float(np.mean([loss(model, batch, strategy, config.dtype) for batch in windows]))

    return evaluate


@dataclasses.dataclass
class Run:
    """A run under way."""

    config: Config
    path: Path
    text: UInt8[np.ndarray, "n"]
    held_out: UInt8[np.ndarray, "m"]
    strategy: Any
    state: State
    progress: Progress
    step: Any


def digest(*texts: UInt8[np.ndarray, "n"]) -> str:
    """Tells whether a text is the same as before."""
    return hashlib.sha256(b"".join(text.tobytes() for text in texts)).hexdigest()


def prepare(options: argparse.Namespace) -> Run:
    """Reads the text, creates or loads the state, and compiles the step.

    **Raises:** `ValueError`, `NotImplementedError` or `OSError` for what cannot be done.
    """
    path = options.out / "checkpoint.eqx"
    config, progress = resolve(options, path)
    strategy = make_strategy(config)
    text, held_out = split(read_documents(config.text and Path(config.text)))
    if min(len(text), len(held_out)) <= config.context:
        raise ValueError(
            f"--context {config.context} needs more text: there are {len(text):,} bytes to train "
            f"on and {len(held_out):,} held out."
        )
    hashed = digest(text, held_out)
    if progress is not None and progress.digest != hashed:
        raise ValueError(f"The text is not the one that {path} is about; use --fresh.")
    options.out.mkdir(parents=True, exist_ok=True)
    state = create_state(config)
    if progress is not None:
        state = load(path, state)
        print(f"continuing {path} after step {len(progress.losses)}")
    size = sum(leaf.size for leaf in jax.tree.leaves(state.model))
    print(
        f"{len(text):,} bytes to train on, {len(held_out):,} held out; {size:,} parameters; "
        f"strategy {config.strategy} on {jax.devices()[0].device_kind}; compiling",
        flush=True,
    )
    step = compile_step(config, strategy, state)
    return Run(config, path, text, held_out, strategy, state, progress or Progress(hashed), step)


def train(run: Run, stop_after: float, started: float) -> int:
    """Trains, evaluates and saves, up to the last step, `stop_after` or a signal.

    **Returns:** the number of the signal, or 0.
    """
    config, progress = run.config, run.progress
    evaluate = make_evaluation(config, run.strategy, run.held_out)
    started -= progress.seconds
    tokens, seconds = 0, 0.0
    bar = tqdm(total=config.steps, initial=len(progress.losses), unit="step", dynamic_ncols=True)
    with bar, caught_signals() as caught:
        while True:
            done = len(progress.losses)
            ended = done >= min(config.steps, stop_after) or bool(caught)
            due = done % config.eval_every == 0 or done == config.steps
            if due and done not in dict(progress.held_out):
                progress.held_out.append((done, evaluate(run.state.model)))
                tqdm.write(f"step {done:5}: {progress.held_out[-1][1]:.3f} held-out bits per byte")
                sys.stdout.flush()
            if due or ended:
                progress.seconds = time.monotonic() - started
                save(run.path, config, progress, run.state)
            if ended:
                return caught[0] if caught else 0
            # The batch is a function of seed and step, so the order of the text needs no saving.
            rng = np.random.default_rng((config.seed, done))
            starts = rng.integers(len(run.text) - config.context, size=config.batch)
            began = time.monotonic()
            windows = windows_at(run.text, starts, config.context)
            run.state, loss = run.step(windows, run.state)
            progress.losses.append(float(loss))
            seconds += time.monotonic() - began
            tokens += config.batch * config.context
            if not math.isfinite(progress.losses[-1]):
                raise FloatingPointError(
                    f"The loss of step {done + 1} is {progress.losses[-1]}; {run.path} is from "
                    "before. Start over with --fresh and a smaller --lr."
                )
            bar.set_postfix_str(f"loss {loss:.3f}, {tokens / seconds:,.0f} tokens/s", refresh=False)
            bar.update()


# What comes out --------------------------------------------------------------------------------


@eqx.filter_jit
def continuation(
    model: LanguageModel,
    strategy: Any,
    tokens: UInt8[Array, "t"],
    used: Int[Array, ""],
    keys: PRNGKeyArray,
    temperature: float = 0.8,
) -> UInt8[Array, "n"]:
    """Samples a byte for each key. The bytes before are the first `used` of the window `tokens`."""

    def one(carry, key):
        tokens, used = carry
        # A row sees nothing after it, so it does not matter what the rest of the window holds.
        logits = model(tokens, strategy)[used - 1].astype(jnp.float32) / temperature
        new = jax.random.categorical(key, logits.at[0].set(-jnp.inf)).astype(jnp.uint8)
        full = used == tokens.shape[0]
        tokens = jnp.where(full, jnp.roll(tokens, -1), tokens)
        used = jnp.where(full, used, used + 1)
        return (tokens.at[used - 1].set(new), used), new

    return jax.lax.scan(one, (tokens, used), keys)[1]


def sample(run: Run, prompt: str, length: int) -> str:
    """The prompt as the start of a document, and `length` bytes that continue it."""
    window = min(run.config.context, 256)
    start = np.frombuffer(b"\0" + prompt.encode(), np.uint8)[-window:]
    tokens = jnp.zeros(window, jnp.uint8).at[: len(start)].set(start)
    keys = jax.random.split(jax.random.key(run.config.seed), length)
    model = cast(run.state.model, run.config.dtype)
    new = continuation(model, run.strategy, tokens, jnp.int32(len(start)), keys)
    return prompt + np.asarray(new).tobytes().decode(errors="replace")


def report_memory(config: Config) -> None:
    """Prints the memory that XLA plans for a training step: of the strategy, and of dense."""
    state = create_state(config)
    print(f"memory of a training step, context {config.context}, batch {config.batch}:")
    for name in dict.fromkeys((config.strategy, "dense")):
        strategy = make_strategy(dataclasses.replace(config, strategy=name))
        memory = compile_step(config, strategy, state).compiled.memory_analysis()
        temporary = memory.temp_size_in_bytes / 2**20
        total = temporary + memory.argument_size_in_bytes / 2**20
        print(f"  {name:12} {total:9,.1f} MiB, {temporary:,.1f} of them temporary", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The program. **Returns:** its exit status."""
    started = time.monotonic()
    parser = make_parser(__doc__ or "")
    options = parser.parse_args(argv)
    try:
        if options.memory_report:
            report_memory(resolve(options, options.out)[0])
            return 0
        run = prepare(options)
    except (ValueError, NotImplementedError, OSError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    try:
        signalled = train(run, options.stop_after, started)
    except FloatingPointError as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    done = len(run.progress.losses)
    if done:
        draw(run.path.with_name("loss.png"), run.progress)
    if done < run.config.steps:
        print(
            f"stopped and saved after step {done} of {run.config.steps}; to continue: "
            f"python {sys.argv[0]} --resume --out {options.out}"
        )
        return 128 + signalled if signalled else 0
    print("sample:", sample(run, options.prompt, options.sample), sep="\n", flush=True)
    (_, first), *_, (_, last) = run.progress.held_out
    print(
        f"held-out bits per byte: {first:.3f} at the start, {last:.3f} at the end; "
        f"{done} steps in {run.progress.seconds:.0f} s"
    )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
