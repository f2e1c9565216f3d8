"""Writes what the README and the front page show of the recorded benchmarks.

Both come from the file of the long table of the benchmarks page: the table in README.md, index.md
and benchmarks.md, and the picture of the README and of index.md.
"""

import argparse
import hashlib
import json
import re
from typing import Any

from .bench import record
from .process import TESTS


DOCS = TESTS.parent / "docs"
DATA, PICTURE = DOCS / record.DATA, DOCS / "pages/scaling.svg"
PAGES = DOCS.parent / "README.md", *(DOCS / "pages" / f"{x}.md" for x in ("index", "benchmarks"))
MARKS = (
    "<!-- Written by tests/measure/front.py. -->\n",
    "<!-- End of what tests/measure/front.py wrote. -->",
)

# What a row of the table says, and its case and figure among the recorded ones.
TIMES = {
    "forward, 2,048 tokens": "cpu-f32-causal-2048-fwd",
    "gradient, 2,048 tokens": "cpu-f32-causal-2048-grad",
    "forward, 2,048 tokens, 2 key heads": "cpu-f32-causal-gqa-2048-fwd",
    "forward, 8,192 tokens": "cpu-f32-causal-8192-fwd",
    "forward, 8,192 tokens, window of 512": "cpu-f32-window-8192-fwd",
}
PEERS = "eqattn", "jax.nn", "torch"


def table() -> str:
    """The table, and what was measured on what."""
    recorded = json.loads(DATA.read_text())
    found = {(row["case"], row["figure"]): row for row in recorded["rows"]}

    def cell(row: dict[str, Any] | None, peer: str, unit: str = "") -> str:
        if row is None or peer not in row["values"]:
            return "-"
        return f"{row['values'][peer]:#.3g}".rstrip(".") + unit

    machine = recorded["machine"]
    article = "an" if machine["processor"][0] in "AEIOU" else "a"
    lines = [
        f"These figures were recorded on {machine['date']} on {article} {machine['processor']}. "
        "Attention is causal, in float32, with 8 heads of 64. Times are multiples of PyTorch's, so "
        "below 1 is faster. Memory is what a call holds beside its arguments and results.",
        "",
        "| | eqattn | `jax.nn` | torch | memory, eqattn | memory, `jax.nn` |",
        "|---|---|---|---|---|---|",
    ]
    for name, case in TIMES.items():
        times, memory = found[case, "time / torch"], found[case, "temp MiB"]
        needs = re.fullmatch(r"jax\.nn needs (.*)", times["note"])
        theirs = needs[1] if needs else cell(memory, "jax.nn", " MiB")
        cells = [cell(times, peer) for peer in PEERS]
        cells += [cell(memory, "eqattn", " MiB"), theirs]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    step = "A step of decoding, 8 rows of up to 8,192 tokens, is {} times as fast as `jax.nn`'s."
    full, short = (
        cell(found[f"cpu-decode-8192-{kind}", "times faster"], "eqattn")
        for kind in ("full", "short")
    )
    lines += ["", step.format(f"{full} (all full) and {short} (most short)")]
    return "\n".join(lines) + "\n"


def digest() -> str:
    return hashlib.sha256(DATA.read_bytes()).hexdigest()


def draw() -> None:
    """Time and memory of the forward pass against the length."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "eqattn"
    from matplotlib import pyplot as plt

    from .plots import plot_scaling

    figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    plot_scaling(DATA, "time / torch", ax=axes[0])
    plot_scaling(DATA, "temp MiB", ax=axes[1])
    axes[0].set_yticks([0.5, 1, 2, 3], ["0.5", "1", "2", "3"])
    for ax, what in zip(axes, ("Time", "Memory"), strict=True):
        ax.set_title(f"{what} of causal attention")
    metadata = {"Date": None, "Description": f"benchmarks.json {digest()}"}
    figure.savefig(PICTURE, metadata=metadata)


def written(page: str) -> str:
    """The page with the table between the marks."""
    before, rest = page.split(MARKS[0])
    _, after = rest.split(MARKS[1])
    return f"{before}{MARKS[0]}\n{table()}\n{MARKS[1]}{after}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are no flags."""


def run(args: argparse.Namespace) -> int:
    """Writes the pages and the picture. **Returns:** 0."""
    for path in PAGES:
        path.write_text(written(path.read_text()))
    draw()
    return 0
