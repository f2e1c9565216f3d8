"""Programs as they are lowered for an A100, on any machine."""

from typing import Any

import jax
from _gpu_lowered import first_visits as first_visits_of


CHIP: Any = jax.sharding.AbstractDevice(
    device_kind="NVIDIA A100-SXM4-80GB", num_cores=None, platform="gpu"
)


def text_of(f, *args, axis="x", size=1) -> str:
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((size,), (axis,), auto, abstract_device=CHIP)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def kernels(f, *args, **mesh) -> int:
    """How many there are, without those of second visits."""
    return len(first_visits(text_of(f, *args, **mesh)))


def first_visits(text: str) -> list[str]:
    """The lines of a program with a kernel that is the first to visit its blocks."""
    return first_visits_of(text, "@__gpu$xla.gpu.triton(")
