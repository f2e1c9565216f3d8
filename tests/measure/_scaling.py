"""Pictures of what attention costs: time, memory, and the work of a ring."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, MaxNLocator

from .._ring.plan import RingPlan
from .._tools.bench.cases import PEERS, Row
from .._tools.bench.report import FILE
from ._style import legend_below, LINES, new_axes, set_title


def plot_scaling(
    source: Any,
    figure: str = "time ms",
    case: str = "cpu-f32-causal-*-fwd",
    *,
    ax: Axes | None = None,
) -> Axes:
    """Draws time or memory against the length, from what `python -m eqattn bench` has written.

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


def plot_ring(plan: RingPlan, *, ax: Axes | None = None) -> Axes:
    """Draws what each device of a ring does, hop by hop.

    Each hop starts when the busiest device has ended the one before. A bar stands for the products
    of a device's queries with the keys of the device whose number is on it. Hatched bars are the
    time that a device waits.

    **Arguments:**

    - `plan`: what [`eqattn.ring_plan`][] returns.
    - `ax`: the `Axes` to draw into. With None, a new figure is made. Share the x axis of several to
        compare layouts.

    **Returns:** the `Axes`.
    """
    work = np.asarray(plan.flops, float)
    longest = work.max(1)
    starts = np.cumsum(longest) - longest
    n = plan.devices
    ax = new_axes(ax, 7.5, 1.6 + 0.32 * n)
    devices = np.arange(n)
    shades = plt.get_cmap("cividis")(np.linspace(0.15, 0.95, n))
    waits: dict[str, Any] = dict(color="none", edgecolor="0.65", hatch="////", linewidth=0)
    for shift, busy, start, end in zip(plan.shifts, work, starts, longest):
        source = (devices - shift) % n
        ax.barh(devices, end - busy, 0.8, start + busy, **waits)
        ax.barh(devices, busy, 0.8, start, color=shades[source], edgecolor="white", linewidth=0.6)
        for i in devices[busy > 0.02 * longest.sum()] if n <= 16 else ():
            dark = np.dot(shades[source[i]][:3], (0.3, 0.6, 0.1)) < 0.5
            at = start + busy[i] / 2, i
            text: dict[str, Any] = dict(
                ha="center", va="center", fontsize="small", color="w" if dark else "k"
            )
            ax.annotate(str(source[i]), at, **text)
    ax.margins(x=0.005)
    ax.set_ylim(n - 0.4, -0.6)
    ax.xaxis.set_major_formatter(EngFormatter(unit="FLOP"))
    ax.yaxis.set_major_locator(MaxNLocator(16, integer=True))
    ax.set_xlabel("products of the forward, hops in lock step")
    ax.set_ylabel("device")
    title = f"{plan.layout}: the busiest device computes {plan.balance:.2f} times the mean"
    set_title(ax, f"{title} ({plan.lock_step:.2f} in lock step)")
    legend_below(
        ax,
        handles=[
            Patch(facecolor=shades[0], label="computes; the number says whose keys"),
            Patch(facecolor="none", edgecolor="0.65", hatch="////", linewidth=0, label="waits"),
        ],
        ncols=2,
    )
    return ax
