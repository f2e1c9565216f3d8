"""Pictures, with matplotlib, which the extra `viz` installs.

Each function draws into the `Axes` that it is given, or into a new figure, and returns the `Axes`;
`ax.figure.savefig("mask.svg")` saves it. No display is needed.
"""

try:
    import matplotlib as _matplotlib  # noqa: F401
except ImportError as _e:
    raise ImportError(
        "eqattn.viz needs matplotlib: python -m pip install matplotlib, or from the sources "
        "python -m pip install -e '.[viz]'."
    ) from _e

from ._masks import plot_blocks as plot_blocks, plot_heads as plot_heads, plot_mask as plot_mask
from ._ring import plot_ring as plot_ring
from ._weights import plot_weights as plot_weights
