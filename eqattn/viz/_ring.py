"""A picture of the work of a ring."""

from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, MaxNLocator

from .._ring.plan import RingPlan
from ._style import legend_below, new_axes, set_title


def plot_ring(plan: RingPlan, *, ax: Axes | None = None) -> Axes:
    """Draws what each device of a ring does, hop by hop.

    Each hop starts when the busiest device has ended the one before. A bar stands for the products
    of a device's queries with the keys of the device whose number is on it. Hatched bars are the
    time that a device waits.

    **Arguments:**

    - `plan`: what [`eqattn.strategies.ring_plan`][] returns.
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
