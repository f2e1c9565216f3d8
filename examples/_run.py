"""The plumbing of the example: its command line, its checkpoints, signals and the loss curve."""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import PyTree


@dataclasses.dataclass(frozen=True)
class Config:
    """What determines the result of a run. A checkpoint holds it."""

    text: str | None = None
    context: int = 256
    batch: int = 0
    layers: int = 4
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    steps: int = 1200
    lr: float = 3e-3
    seed: int = 0
    strategy: str = "blockwise"
    dtype: str = "float32"
    eval_every: int = 0
    eval_bytes: int = 32768

    def complete(self) -> "Config":
        """With the sizes that follow from others. **Raises:** `ValueError` for impossible ones."""
        if self.width % (2 * self.heads):
            raise ValueError(
                f"--width {self.width} is not a multiple of twice --heads {self.heads}: rotary "
                "positions turn pairs of a head's features, so each head needs an even number."
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"--heads {self.heads} is not a multiple of --kv-heads {self.kv_heads}."
            )
        if not 0 < self.lr < math.inf:
            raise ValueError(f"--lr {self.lr} is not a positive number.")
        if self.text is not None and not Path(self.text).exists():
            raise ValueError(f"--text {self.text} does not exist.")
        return dataclasses.replace(
            self,
            batch=self.batch or max(1, 1024 // self.context),
            eval_every=self.eval_every or max(1, min(500, self.steps // 10)),
        )


QUICK = dict(context=64, layers=2, width=64, steps=100, eval_bytes=8192)


@dataclasses.dataclass
class Progress:
    """How far a run is: the loss of each step, and `(step, loss)` on the held-out text."""

    digest: str
    seconds: float = 0.0
    losses: list[float] = dataclasses.field(default_factory=list)
    held_out: list[tuple[int, float]] = dataclasses.field(default_factory=list)


# The command line ------------------------------------------------------------------------------


def _integer(least: int):
    def convert(text: str) -> int:
        with contextlib.suppress(ValueError):
            if int(text) >= least:
                return int(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {least}")

    return convert


def make_parser(description: str) -> argparse.ArgumentParser:
    """All options. Those of `Config` are absent from the result unless given."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    count = _integer(1)

    def option(name: str, kind: Any, text: str, **kwargs: Any) -> None:
        default = getattr(Config, name)
        text += f" (default {default})" if default else ""
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, help=text, default=argparse.SUPPRESS, **kwargs)

    option("text", str, "a file or folder to learn from (default: Python's standard library)")
    option("context", count, "bytes per sequence")
    option("batch", count, "sequences per step (default: 1024 bytes' worth, at least 1)")
    option("layers", count, "layers")
    option("width", count, "features of a byte's vector, a multiple of twice --heads")
    option("heads", count, "query heads, a multiple of --kv-heads")
    option("kv_heads", count, "key and value heads")
    option("steps", count, "training steps; a finished run can be continued with more")
    option("lr", float, "peak learning rate")
    option("seed", _integer(0), "of the parameters, the order of the text, the sample (default 0)")
    option("strategy", str, "how attention is computed: a name in AttentionRegistry")
    option("dtype", str, "to compute in", choices=["float32", "bfloat16"])
    option("eval_every", count, "steps between evaluations, each with a save (default: ten in all)")
    option("eval_bytes", count, "held-out bytes to evaluate on, about")
    add = parser.add_argument
    out = Path("runs/language_model")
    add("--out", type=Path, default=out, help="folder of the results (default %(default)s)")
    add("--prompt", default="import ", help="the start of the sample text (default %(default)r)")
    add("--sample", type=count, default=400, help="bytes of sample text (default %(default)s)")
    add("--stop-after", type=count, default=math.inf, help="save and stop after this step")
    add("--quick", action="store_true", help="a tiny model for a few seconds, to try things out")
    add("--memory-report", action="store_true", help="print the memory of a step, do nothing else")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--resume", action="store_true", help="fail if there is no checkpoint")
    start.add_argument("--fresh", action="store_true", help="start over, replacing a checkpoint")
    return parser


def resolve(options: argparse.Namespace, path: Path) -> tuple[Config, Progress | None]:
    """The run that the options ask for, and how far it is if the checkpoint `path` is continued.

    **Raises:** `ValueError` if they contradict each other or the checkpoint.
    """
    names = {field.name for field in dataclasses.fields(Config)}
    given = {name: value for name, value in vars(options).items() if name in names}
    if "text" in given:
        given["text"] = str(Path(given["text"]).expanduser().resolve())
    if options.quick:
        given = QUICK | given
    if options.fresh or options.memory_report or not path.exists():
        if options.resume:
            raise ValueError(f"--resume: there is no checkpoint {path}.")
        return Config(**given).complete(), None
    kept, progress = _load_header(path)
    for name, value in given.items():
        if name != "steps" and value != getattr(kept, name):
            raise ValueError(
                f"{path} is of a run with {name} {getattr(kept, name)}, not {value}. Continue it "
                "without that option, start over with --fresh, or choose another --out."
            )
    config = dataclasses.replace(kept, **given).complete()
    if len(progress.losses) > config.steps:
        raise ValueError(
            f"--steps {config.steps}: {path} is of step {len(progress.losses)} already."
        )
    return config, progress


# Checkpoints -----------------------------------------------------------------------------------


def save(path: Path, config: Config, progress: Progress, state: PyTree) -> None:
    """Writes a checkpoint, a line of JSON and then the arrays, replacing the old one atomically."""
    partial = path.with_suffix(".partial")
    header = dict(config=dataclasses.asdict(config), progress=dataclasses.asdict(progress))
    with open(partial, "wb") as file:
        file.write(json.dumps(header).encode() + b"\n")
        eqx.tree_serialise_leaves(file, state)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _load_header(path: Path) -> tuple[Config, Progress]:
    with open(path, "rb") as file:
        try:
            header = json.loads(file.readline())
            return Config(**header["config"]), Progress(**header["progress"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a checkpoint of this program.") from error


def load(path: Path, like: PyTree) -> PyTree:
    """The arrays of a checkpoint, in a tree like `like`. **Raises:** `ValueError` if damaged."""
    with open(path, "rb") as file:
        file.readline()
        try:
            return eqx.tree_deserialise_leaves(file, like)
        except (ValueError, EOFError, RuntimeError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error


@contextlib.contextmanager
def caught_signals() -> Iterator[list[int]]:
    """A list that gets the number of a SIGINT or SIGTERM. A second one stops at once."""
    caught: list[int] = []

    def handler(number: int, _: Any) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)
        os.write(2, b"\nFinishing the step, then saving. Once more stops at once.\n")

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


# The loss curve --------------------------------------------------------------------------------


def draw(path: Path, progress: Progress) -> None:
    """The losses of training and of the held-out text, as a picture."""
    from matplotlib.figure import Figure  # without pyplot it needs no display

    losses = np.array(progress.losses)
    steps = np.arange(1, len(losses) + 1)
    span = max(1, len(losses) // 50)
    smooth = np.convolve(losses, np.full(span, 1 / span), mode="valid")
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="bits per byte")
    axes.plot(steps, losses, color="C0", alpha=0.25)
    axes.plot(steps[span - 1 :], smooth, color="C0", label="training")
    axes.plot(*np.array(progress.held_out).T, "o-", color="C1", label="held out")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
