"""Kernels: other lowerings of the visits of a grid, in one package for each kind of device.

A package defines a subclass of `eqattn._sweep.lowering.Lowering`. It imports Pallas only where a
kernel is lowered, so that importing eqattn stays fast. To add a device, write its package, and add
its backend to the tables here and to `Backend`. If these are further kernels of a device that has
some, add it to `OTHER_KERNELS`, too.
"""

from typing import TYPE_CHECKING

from .._config.platform import Backend, OTHER_KERNELS


if TYPE_CHECKING:
    from .._sweep.lowering import Lowering


BACKENDS: tuple[str, ...] = ("tpu", "gpu", "cuda", "triton")
"""The backends (values of `eqattn.Backend`) for which there are kernels. `"gpu"` has those of
`"cuda"`: there are none for `"rocm"`.
"""

IN_PLACE: tuple[str, ...] = ("tpu", "gpu", "cuda", "triton")
"""The backends whose kernels read keys and values where they lie in memory."""

FIXED: tuple[str, ...] = ("tpu",)
"""The backends whose kernels keep the bits that `bitwise=True` promises."""


def lowering_for(backend: str, asked: str) -> "Lowering | None":
    """The lowering that runs the kernels of a backend; None where only those who ask for kernels
    get them.

    **Arguments:**

    - `backend`: one of `BACKENDS`.
    - `asked`: the platform that the caller named, as in `Lowering`.
    """
    assert backend in BACKENDS, backend
    if backend == "tpu":
        from .tpu import TPULowering

        return TPULowering(asked)
    if asked == "cudnn":
        from .nvidia._cudnn import CuDNNLowering

        return CuDNNLowering(asked)
    from .nvidia._chip import is_hopper
    from .nvidia.hopper import GPULowering

    if asked == "auto":  # Others have not been measured on the devices that they are for.
        kernels = GPULowering(asked)
        return kernels if backend != "triton" and kernels.measured else None
    if backend == "triton" or not (asked == "interpret" or is_hopper()):
        from .nvidia.triton import TritonLowering

        return TritonLowering(asked)
    return GPULowering(asked)


def method_on(device: str) -> str:
    """The name of the method by which a strategy runs on a device."""
    return f"forward_{OTHER_KERNELS.get(Backend(device), device)}"


def interpreted_backend(backend: str, available: tuple[str, ...]) -> str:
    """Whose kernels `platform="interpret"` interprets: those of the backend. If it has none, these
    are the first ones that are `available`.
    """
    return str(backend) if backend in available else available[0]
