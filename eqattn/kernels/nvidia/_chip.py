"""What kernels for NVIDIA GPUs know of the chip, whichever compiler makes them."""

import jax


TILE = 128
"""The rows of a program: as many as two warpgroups multiply at once."""

WARPGROUP = TILE // 2
"""The rows that the threads of one warpgroup multiply at once."""

LARGEST_DIM = 256
"""The most numbers of a query, key or value. More would not fit into registers."""

LONGEST = 576
"""The most numbers of a key that is longer than its value, as DeepSeek's latents are."""


def capability() -> str:
    """The compute capability of the NVIDIA GPU of this process; empty if it has none."""
    try:
        device, *_ = jax.local_devices(backend="cuda")
    except RuntimeError:
        return ""
    return str(device.compute_capability)


def is_hopper() -> bool:
    """Whether `platform="gpu"` means the kernels for Hopper: also where there is no NVIDIA GPU."""
    return capability()[:2] in ("", "9.")
