"""`python tests/measure plot`: pictures of what `bench` and `tpu-report` have written."""

import argparse
import dataclasses
import fnmatch
import re
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from eqattn.viz._style import legend_below, LINES, new_axes, ORANGE, set_title

from .bench.cases import PEERS, Row
from .bench.report import FILE
from .results_file import new_file
from .tpu_report.rows import FILE as SCHEDULES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `plot`."""
    add = parser.add_argument
    add("source", type=Path, metavar="FILE", help="the .json file of bench or of tpu-report")
    add("--out", type=new_file, default=Path("plot.svg"), help="the picture; its end is its format")
    add("--figure", default="time ms", help="of bench: what is drawn against the length")
    add("--case", default="cpu-f32-causal-*-fwd", help="of bench: * in the place of the length")
    add("--kernel", default="forward", help="of tpu-report: a name or a pattern with *")
    add("--chip", default="*", help="of tpu-report: a name or a pattern with *")


def run(args: argparse.Namespace) -> int:
    """Draws and saves. **Returns:** 0. **Raises:** `ValueError` for another file."""
    if not args.source.is_file():
        raise ValueError(f"there is no file {args.source}")
    if f'"{SCHEDULES.header}"' in args.source.read_text()[:100]:
        plot_schedule(args.source, args.kernel, args.chip)
    else:
        plot_scaling(args.source, args.figure, args.case)
    plt.savefig(args.out)
    print(f"written: {args.out}")
    return 0


def plot_scaling(
    source: Any,
    figure: str = "time ms",
    case: str = "cpu-f32-causal-*-fwd",
    *,
    ax: Axes | None = None,
) -> Axes:
    """Draws time or memory against the length, from what `python tests/measure bench` has written.

    **Arguments:**

    - `source`: the path of the `.json` file.
    - `figure`: a figure of the bench. `"time ms"` is the CPU time of a call, in milliseconds.
        `"time / torch"` is relative to that library, even if the bench recorded the ratio to
        another. `"temp MiB"` is temporary memory, in mebibytes, as XLA reports it.
    - `case`: a name of cases, with `*` in the place of the length.
    - `ax`: the `Axes` to draw into. With None, a new figure is made.

    **Returns:** the `Axes`, with one line per library, on logarithmic axes.

    **Raises:** `ValueError` if the bench did not write the file, or if it has no such figure.
    """
    pattern = re.compile(re.escape(case).replace(r"\*", r"(\d+)"))
    rows, _ = FILE.read(Path(source))
    relative = [_relative(row, figure) for row in rows]
    lengths = {int(m[1]): row for row in relative if (m := _match(pattern, row, figure))}
    if not lengths:
        found = sorted({re.sub(r"-\d+-", "-*-", r.case) for r in rows if r.figure == figure})
        known = sorted({r.figure for r in rows})
        raise ValueError(
            f"{source} has no {figure!r} of {case!r}; it has the figures {known}, this one of "
            f"{found}. Write * in the place of the length."
        )
    ax = new_axes(ax)
    for name, colour, marker in zip(("eqattn", *PEERS), LINES, "osD^v"):
        points = [(n, r.values[name]) for n, r in sorted(lengths.items()) if r.values.get(name)]
        if points:
            style: dict[str, Any] = dict(
                color=colour, marker=marker, linewidth=2 if name == "eqattn" else 1.3
            )
            ax.plot(*zip(*points), label=name, markersize=5, **style)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(sorted(lengths), [f"{n:,}" for n in sorted(lengths)])
    ax.minorticks_off()
    ax.set_xlabel("length (tokens)")
    ax.set_ylabel(_FIGURES.get(figure, figure))
    set_title(ax, case)
    ax.grid(linewidth=0.4, color="0.85")
    ax.legend(frameon=False)
    return ax


_FIGURES = {
    "time ms": "CPU time of a call (ms)",
    "temp MiB": "temporary memory (MiB)",
    "time / torch": "CPU time of a call, relative to PyTorch's",
    "time / jax.nn": "CPU time of a call, relative to jax.nn's",
}


def _relative(row: Row, figure: str) -> Row:
    """Converts a row of times relative to some library to one relative to that of the figure."""
    kind, _, reference = figure.partition(" / ")
    unit = row.values.get(reference)
    if row.figure == figure or not (unit and row.figure.startswith(f"{kind} / ")):
        return row
    values = {name: x / unit for name, x in row.values.items()}
    return dataclasses.replace(row, figure=figure, values=values)


def _match(pattern: re.Pattern, row: Row, figure: str) -> re.Match | None:
    return pattern.fullmatch(row.case) if row.figure == figure else None


_UNITS = {
    "matrix": "matrix units",
    "vector": "vector units",
    "exponential": "exponential unit",
    "lanes": "across lanes",
    "load": "loads",
    "store": "stores",
}


def plot_schedule(
    source: Any, kernel: str = "forward", chip: str = "*", *, ax: Axes | None = None
) -> Axes:
    """Draws how busy a kernel keeps each unit of a TPU, from what `python tests/measure tpu-report` has
    written.

    The compiler's schedule gives the cycles of one step of the kernel, on a pair of blocks that is
    not masked. The bars are shares of these cycles. A line marks the share that the products would
    take at the peak of the matrix units.

    **Arguments:**

    - `source`: the path of the `.json` file.
    - `kernel`, `chip`: names in the file, or patterns of names with `*`.
    - `ax`: the `Axes` to draw into. With None, a new figure is made.

    **Returns:** the `Axes`, with one group of bars for each kernel and chip.

    **Raises:** `ValueError` if the report did not write the file, or if it has no such kernel and
    chip.
    """
    recorded, versions = SCHEDULES.read(Path(source))
    match = fnmatch.fnmatchcase
    chosen = [r for r in recorded if match(r.kernel, kernel) and match(r.chip, chip)]
    if not chosen:
        known = (sorted({r.kernel for r in recorded}), sorted({r.chip for r in recorded}))
        raise ValueError(
            f"{source} has no {kernel!r} on {chip!r}; it has the kernels {known[0]} on {known[1]}."
        )
    ax = new_axes(ax, 7.5, 1.4 + 0.75 * len(chosen))
    places, thick = np.arange(len(chosen)), 0.8 / len(_UNITS)
    for i, ((unit, label), colour) in enumerate(zip(_UNITS.items(), (*LINES, ORANGE))):
        at = places + thick * (i - (len(_UNITS) - 1) / 2)
        ax.barh(at, [r.units[unit] for r in chosen], thick, label=label, color=colour)
    marked = [(y, r.useful) for y, r in zip(places, chosen) if r.useful is not None]
    for y, useful in marked:
        label = "useful products" if y == marked[0][0] else "_"
        ax.plot([useful] * 2, [y - 0.43, y + 0.43], "k-", linewidth=1.5, label=label)
    ax.set_yticks(places, [f"{r.kernel}, {r.chip}" for r in chosen])
    ax.set_ylim(len(chosen) - 0.5, -0.5)
    ax.set_xlim(0, 1)
    ax.xaxis.set_major_formatter(PercentFormatter(1))
    ax.grid(axis="x", linewidth=0.4, color="0.85")
    ax.set_axisbelow(True)
    ax.set_xlabel("busy, of a step's cycles")
    set_title(ax, ", ".join(f"{name} {v}" for name, v in versions.items()))
    legend_below(ax, ncols=4)
    return ax
