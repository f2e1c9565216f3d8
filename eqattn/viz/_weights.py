"""A picture of attention weights."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from .._output import AttentionOutput
from ._style import figure_of, label_positions, matrix, new_axes, set_title


def plot_weights(
    output: Any,
    *,
    batch: int = 0,
    head: int = 0,
    query_labels: Sequence[str] | None = None,
    key_labels: Sequence[str] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draws the attention weights of one head.

    **Arguments:**

    - `output`: what [`eqattn.attention`][] returns for `Dense(metadata)` and
        `return_weights=True`, or the weights `[*b, heads, t, s]` themselves.
    - `batch`, `head`: which element of the (flattened) batch, and which head, is drawn.
    - `query_labels`, `key_labels`: one text per query and per key, such as its token.
    - `ax`: the `Axes` to draw into. With None, a new figure is made.

    **Returns:** the `Axes`.

    **Raises:** `ValueError` if there are no weights, or not as many labels as positions.
    """
    weights = output.attention_weights if isinstance(output, AttentionOutput) else output
    if weights is None:
        raise ValueError(
            "There are no attention weights: call attention(..., Dense(metadata), "
            "return_weights=True), as other strategies never form them."
        )
    weights = np.asarray(weights, np.float32)
    if weights.ndim < 3:
        raise ValueError(f"Weights are [*b, heads, t, s], got {list(weights.shape)}.")
    t, s = weights.shape[-2:]
    if not weights.size:
        raise ValueError(f"There is nothing to draw in weights of shape {list(weights.shape)}.")
    image = matrix(weights.reshape(-1, *weights.shape[-3:]), batch, head, "the weights")
    for labels, size, name in ((query_labels, t, "query"), (key_labels, s, "key")):
        if labels is not None and len(labels) != size:
            raise ValueError(f"{len(labels)} {name}_labels for {size} positions.")
    ax = new_axes(ax)
    ends = (0, s, t, 0)
    drawn = ax.imshow(image, "cividis", vmin=0, interpolation="nearest", aspect="auto", extent=ends)
    figure_of(ax).colorbar(drawn, ax=ax, label="attention weight", shrink=0.9)
    label_positions(ax, t, s)
    both = (query_labels, t, ax.yaxis, "query"), (key_labels, s, ax.xaxis, "key")
    for labels, size, axis, name in both:
        if labels is None:
            continue
        turned = 90 if axis is ax.xaxis and max(map(len, labels)) > 1 else 0
        how: Any = dict(rotation=turned, fontsize="small", parse_math=False)  # a token may be "$"
        axis.set_ticks(np.arange(size) + 0.5, labels, **how)
        axis.set_label_text(name)
    set_title(ax, f"head {head}")
    return ax
