"""Kernels: other lowerings of the visits of a grid, in one package for each kind of device.

A package defines a subclass of `eqattn._sweep.lowering.Lowering`. It imports Pallas only where a
kernel is lowered, so that importing eqattn stays fast. To add a device, write its package and add
its backend here.
"""

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .._sweep.lowering import Lowering


BACKENDS: tuple[str, ...] = ("tpu",)
"""The backends (values of `eqattn.Backend`) for which there are kernels."""


def lowering_for(backend: str, asked: str) -> "Lowering":
    """The lowering that runs the kernels of a backend.

    **Arguments:**

    - `backend`: one of `BACKENDS`.
    - `asked`: the platform that the caller named, as in `Lowering`.
    """
    assert backend in BACKENDS, backend
    from .tpu import TPULowering

    return TPULowering(asked)
