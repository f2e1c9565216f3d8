"""Programs as they are lowered for NVIDIA GPUs, on any machine."""

import jax


def text_of(f, *args) -> str:
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def kernels(f, *args) -> int:
    """How many there are, without those of second visits, which change what the first ones wrote."""
    return len(first_visits(text_of(f, *args)))


def first_visits(text: str, kernel: str = "@mosaic_gpu_v2") -> list[str]:
    """The lines of a program with a kernel that is the first to visit its blocks."""
    found = [x for x in text.splitlines() if kernel in x]
    return [x for x in found if "output_operand_alias" not in x]
