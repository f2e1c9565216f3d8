"""A picture of what keeps a TPU busy, from the schedules of the kernels."""

import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from .._tools.tpu_report.rows import FILE
from ._style import legend_below, LINES, new_axes, ORANGE, set_title


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
    """Draws how busy a kernel keeps each unit of a TPU, from what `python -m eqattn tpu-report` has
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
    recorded, versions = FILE.read(Path(source))
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
