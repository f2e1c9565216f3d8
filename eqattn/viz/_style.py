"""The colours, axes and legends that the pictures share."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Patch
from matplotlib.textpath import TextPath
from matplotlib.ticker import MaxNLocator, StrMethodFormatter
from matplotlib.transforms import ScaledTranslation


# These are Okabe and Ito's colours, which differ with any colour vision.
BLUE, ORANGE, PALE, WHITE = "#0072B2", "#E69F00", "#FBE7BD", "#FFFFFF"
LINES = (BLUE, "#D55E00", "#009E73", "#CC79A7", "#000000")


def new_axes(ax: Axes | None, width: float = 5.0, height: float = 5.4) -> Axes:
    if ax is not None:
        return ax
    return plt.subplots(figsize=(width, height), layout="constrained")[1]


def figure_of(ax: Axes) -> Figure:
    figure = ax.get_figure(root=True)
    assert figure is not None
    return figure


def legend_below(ax: Axes, **kwargs: Any) -> None:
    """Adds a legend below the label of the x axis."""
    below = ax.transAxes + ScaledTranslation(0, -0.5, figure_of(ax).dpi_scale_trans)
    place: dict[str, Any] = dict(bbox_to_anchor=(0.5, 0), bbox_transform=below)
    ax.legend(loc="upper center", frameon=False, **place, **kwargs)


def legend(ax: Axes, colours: Sequence[tuple[str, str]]) -> None:
    patches = [Patch(facecolor=c, edgecolor="0.4", linewidth=0.6, label=t) for c, t in colours]
    columns = 2 if len(patches) == 4 else len(patches)
    legend_below(ax, handles=patches, ncols=columns, handlelength=1, columnspacing=1.2)


def set_title(ax: Axes, *paragraphs: str) -> None:
    """Sets a title of at most three lines for each paragraph. It is as wide as the place that the
    axes have in the figure, less a margin of 12%.

    Matplotlib centres titles over the axes and does not wrap them. A wider title would run into the
    title of the next axes, or out of the figure.
    """
    spec = ax.get_subplotspec()
    share = 1.0 if spec is None else len(spec.colspan) / spec.get_gridspec().ncols
    points = 72 * 0.88 * share * figure_of(ax).get_figwidth()
    font = FontProperties(size="medium")
    lines = [line for text in paragraphs for line in _wrapped(text, points, font)]
    ax.set_title("\n".join(lines), fontproperties=font)


def _wrapped(text: str, points: float, font: FontProperties, most: int = 3) -> list[str]:
    """Breaks a text into at most `most` lines, each at most `points` wide. What does not fit is
    cut, and ends in an ellipsis.
    """

    def fits(line: str) -> bool:
        width = TextPath((0, 0), line.replace("$", "S"), prop=font).get_extents().width
        return bool(width <= points)

    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if fits(longer) or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    lines, cut = lines[:most], len(lines) > most
    for i, line in enumerate(lines):
        ending = "\u2026" if (cut and i == most - 1) or not fits(line) else ""
        while ending and line and not fits(line + ending):
            line = line[:-1]
        lines[i] = line + ending
    return lines


def label_positions(ax: Axes, t: int, s: int) -> None:
    ax.set_xlabel("key position (tokens)")
    ax.set_ylabel("query position (tokens)")
    ax.set_xlim(0, s)
    ax.set_ylim(t, 0)
    for axis in (ax.xaxis, ax.yaxis):
        ticks = 8 if s < 10_000 else 5  # more labels would overlap
        axis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 4, 5, 8, 10], integer=True))
        axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def matrix(array: np.ndarray, batch: int, head: int, names: str) -> np.ndarray:
    """Returns the matrix of one batch element and head of an array
    `[batch, heads, rows, columns]`. **Raises:** `ValueError` if there is none.
    """
    for i, (index, axis) in enumerate(((batch, "batch"), (head, "head"))):
        size = array.shape[i]
        if not 0 <= index < size:
            raise ValueError(f"{axis}={index} is outside of {names}, which have {size} there.")
    return array[batch, head]


def percent(share: float) -> str:
    return f"{share:.1%}" if 0 < share < 0.1 or 0.9 < share < 1 else f"{share:.0%}"
