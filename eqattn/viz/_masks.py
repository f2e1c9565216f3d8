"""Draws masks: their pairs, their blocks, and how sparse each head is."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.ticker import MaxNLocator

from .._misc import as_size, concrete
from .._problem.problem import as_mask
from .._sweep.grid import EMPTY, FULL, PARTIAL
from ..masks._base import AbstractMask, block_table
from ._style import (
    BLUE,
    label_positions,
    legend,
    matrix,
    new_axes,
    ORANGE,
    PALE,
    percent,
    set_title,
    WHITE,
)


# `plot_mask` evaluates and draws every pair, in memory and time that grow with their number. The
# bound was chosen by trial: 4096 x 4096 pairs, more than a figure has pixels for.
_MOST_PAIRS = 2**24


_TRACED = "A mask of traced arrays has no picture: draw it outside of jax.jit."


def _mask(mask: Any) -> AbstractMask:
    found = as_mask(mask)
    if found is None:
        raise ValueError("There is no mask to draw: without one, every pair is visible.")
    return found


def _title(mask: AbstractMask) -> str:
    text = repr(mask)
    return text if len(text) <= 56 else text[:55] + "\u2026"


def plot_mask(  # noqa: PLR0913 (the options of the picture)
    mask: Any,
    t: int,
    s: int | None = None,
    *,
    block_q: int | None = None,
    block_k: int | None = None,
    batch_shape: Sequence[int] = (),
    heads: int = 1,
    batch: int = 0,
    head: int = 0,
    ax: Axes | None = None,
) -> Axes:
    """Draws which pairs a mask makes visible, and which of them blocks skip.

    **Arguments:**

    - `mask`: a mask, or booleans broadcastable to `[*b, heads, t, s]`.
    - `t`, `s`: how many queries and keys there are. By default `s` is `t`.
    - `block_q`, `block_k`: the size of blocks. If they are given, blocks are outlined, and the
        colours tell hidden pairs that are visited from pairs that are skipped.
    - `batch_shape`, `heads`: the shape of the batch, and the number of heads.
    - `batch`, `head`: which element of the (flattened) batch, and which head, is drawn.
    - `ax`: the `Axes` to draw into. With None, a new figure is made.

    **Returns:** the `Axes`.

    **Raises:** `ValueError` for more than 16 million pairs, which `plot_blocks` can draw.
    """
    mask, s = _mask(mask), t if s is None else s
    blocks = block_q is not None or block_k is not None
    if min(t, s) < 1 or t * s > _MOST_PAIRS:
        raise ValueError(f"plot_mask draws 1 to {_MOST_PAIRS:,} pairs, not {t} x {s}: plot_blocks.")
    pairs = concrete(mask.as_array(t, s, batch_shape=batch_shape, heads=heads))
    if pairs is None:
        raise ValueError(_TRACED)
    visible = matrix(pairs.reshape(-1, heads, t, s), batch, head, "the mask's axes")
    block_q, block_k = t if block_q is None else block_q, s if block_k is None else block_k
    table = None
    if blocks:
        table = _table(mask, t, s, block_q, block_k, batch_shape, heads, batch, head)
    ax = new_axes(ax)
    if table is None:
        image, colours = visible.astype(int), [WHITE, BLUE]
        shown = [(BLUE, f"visible {percent(visible.mean())}"), (WHITE, "hidden")]
    else:
        rows, columns = np.arange(t) // block_q, np.arange(s) // block_k
        of_block = table[np.ix_(rows, columns)]
        image = np.where(
            of_block == EMPTY, 0, np.where(visible, np.where(of_block == FULL, 3, 2), 1)
        )
        colours = [WHITE, PALE, ORANGE, BLUE]
        shown = [
            (BLUE, "visible, block full"),
            (ORANGE, "visible"),
            (PALE, "hidden, visited"),
            (WHITE, f"skipped: {percent((table == EMPTY).mean())} of blocks"),
        ]
        for draw, size, end in ((ax.axhline, block_q, t), (ax.axvline, block_k, s)):
            for at in range(0, end + 1, size):
                draw(at, color="0.6", linewidth=0.5)
    cells: dict[str, Any] = dict(interpolation="nearest", aspect="auto", extent=(0, s, t, 0))
    ax.imshow(image, ListedColormap(colours), vmin=0, vmax=len(colours) - 1, **cells)
    label_positions(ax, t, s)
    set_title(ax, _title(mask))
    legend(ax, shown)
    return ax


def _table(mask, t, s, block_q, block_k, batch_shape, heads, batch, head) -> np.ndarray:  # noqa: PLR0913 (the options of the picture)
    whole = _tables(mask, t, s, block_q, block_k, batch_shape, heads)
    return matrix(whole, batch, head, "the mask's axes")


def _tables(mask, t, s, block_q, block_k, batch_shape, heads) -> np.ndarray:
    """The classes of all blocks, `[batch, heads, rows, columns]`."""
    sizes = dict(t=t, s=s, block_q=block_q, block_k=block_k)
    sizes = {name: as_size(n, name, least=1) for name, n in sizes.items()}
    lead = _leading(batch_shape, heads)
    table = block_table(mask, *sizes.values(), batch_shape=batch_shape, heads=heads)
    if not isinstance(table, np.ndarray):
        raise ValueError(_TRACED)
    return np.broadcast_to(table, (*lead, *table.shape[2:]))


def _leading(batch_shape: Sequence[int], heads: int) -> tuple[int, int]:
    heads = as_size(heads, "heads", least=1)
    return math.prod(as_size(n, "batch_shape", least=1) for n in batch_shape), heads


def plot_blocks(  # noqa: PLR0913 (the options of the picture)
    mask: Any,
    t: int,
    s: int | None = None,
    *,
    block_q: int = 128,
    block_k: int = 128,
    batch_shape: Sequence[int] = (),
    heads: int = 1,
    batch: int = 0,
    head: int = 0,
    ax: Axes | None = None,
) -> Axes:
    """Draws which blocks of a mask are skipped, partial and full, at any length.

    No pair is evaluated: the classes follow from the mask's function, as when attention runs. Those
    of a [`Selected`][eqattn.Selected] are an exception: their pairs are written out.

    **Arguments:** they are those of `plot_mask`. Blocks are 128 x 128 by default.

    **Returns:** the `Axes`.
    """
    mask, s = _mask(mask), t if s is None else s
    table = _table(mask, t, s, block_q, block_k, batch_shape, heads, batch, head)
    ax = new_axes(ax)
    ends = (0, table.shape[1] * block_k, table.shape[0] * block_q, 0)
    colours = ListedColormap([WHITE, ORANGE, BLUE])
    ax.imshow(table, colours, vmin=0, vmax=2, interpolation="nearest", aspect="auto", extent=ends)
    label_positions(ax, t, s)
    set_title(ax, _title(mask), f"blocks of {block_q} x {block_k}")
    legend(ax, _classes(*((table == c).mean() for c in (EMPTY, PARTIAL, FULL))))
    return ax


def _classes(*shares: float) -> list[tuple[str, str]]:
    names = zip((WHITE, ORANGE, BLUE), ("skipped", "partial", "full"), shares)
    return [(colour, f"{name} {percent(share)}") for colour, name, share in names][::-1]


def plot_heads(
    mask: Any,
    t: int,
    s: int | None = None,
    *,
    heads: int,
    block_q: int = 128,
    block_k: int = 128,
    batch_shape: Sequence[int] = (),
    ax: Axes | None = None,
) -> Axes:
    """Draws how sparse each head is, as bars of the shares of full, partial and skipped blocks.

    **Arguments:** they are those of `plot_blocks`. Shares are means over the batch.

    **Returns:** the `Axes`.
    """
    mask, s = _mask(mask), t if s is None else s
    tables = _tables(mask, t, s, block_q, block_k, batch_shape, heads)
    ax = new_axes(ax, height=1.8 + 0.3 * heads)
    left = np.zeros(heads)
    for code, colour in ((FULL, BLUE), (PARTIAL, ORANGE), (EMPTY, WHITE)):
        share = 100 * (tables == code).mean((0, 2, 3))
        ax.barh(range(heads), share, 0.8, left, color=colour, edgecolor="0.4", linewidth=0.6)
        left += share
    for h, skipped in enumerate((tables == EMPTY).mean((0, 2, 3))):
        ax.annotate(
            percent(skipped), (101, h), va="center", fontsize="small", annotation_clip=False
        )
    ax.set_xlim(0, 100)
    ax.set_ylim(heads - 0.5, -0.5)
    ax.set_xlabel(f"share of {block_q} x {block_k} blocks (%); the numbers: skipped")
    ax.set_ylabel("head")
    ax.yaxis.set_major_locator(MaxNLocator(16, integer=True))
    set_title(ax, _title(mask), f"{t:,} queries x {s:,} keys")
    legend(ax, [(BLUE, "full"), (ORANGE, "partial"), (WHITE, "skipped")])
    return ax
