"""What the pictures share: colours, axes and legends."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, StrMethodFormatter
from matplotlib.transforms import ScaledTranslation


# Okabe and Ito's colours, which are told apart whatever one's colour vision.
BLUE, ORANGE, PALE, WHITE = "#0072B2", "#E69F00", "#FBE7BD", "#FFFFFF"
LINES = (BLUE, "#D55E00", "#009E73", "#CC79A7", "#000000")


def new_axes(ax: Axes | None, width: float = 5.0, height: float = 4.6) -> Axes:
    if ax is not None:
        return ax
    return plt.subplots(figsize=(width, height), layout="constrained")[1]


def figure_of(ax: Axes) -> Figure:
    figure = ax.get_figure(root=True)
    assert figure is not None
    return figure


def legend_below(ax: Axes, **kwargs: Any) -> None:
    """A legend below the label of the x axis."""
    below = ax.transAxes + ScaledTranslation(0, -0.5, figure_of(ax).dpi_scale_trans)
    place: dict[str, Any] = dict(bbox_to_anchor=(0.5, 0), bbox_transform=below)
    ax.legend(loc="upper center", frameon=False, **place, **kwargs)


def legend(ax: Axes, colours: Sequence[tuple[str, str]]) -> None:
    patches = [Patch(facecolor=c, edgecolor="0.4", linewidth=0.6, label=t) for c, t in colours]
    columns = 2 if len(patches) == 4 else len(patches)
    legend_below(ax, handles=patches, ncols=columns, handlelength=1, columnspacing=1.2)


def label_positions(ax: Axes, t: int, s: int) -> None:
    ax.set_xlabel("key position (tokens)")
    ax.set_ylabel("query position (tokens)")
    ax.set_xlim(0, s)
    ax.set_ylim(t, 0)
    for axis in (ax.xaxis, ax.yaxis):
        ticks = 8 if s < 10_000 else 5  # that their labels leave room for
        axis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 4, 5, 8, 10], integer=True))
        axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def matrix(array: np.ndarray, batch: int, head: int, names: str) -> np.ndarray:
    """One matrix of an array `[batch, heads, rows, columns]`, whose first axes may have size 1."""
    for i, (index, axis) in enumerate(((batch, "batch"), (head, "head"))):
        size = array.shape[i]
        if not 0 <= index < size:
            raise ValueError(f"{axis}={index} is outside of {names}, which have {size} there.")
    return array[batch, head]


def percent(share: float) -> str:
    return f"{share:.1%}" if 0 < share < 0.1 or 0.9 < share < 1 else f"{share:.0%}"
