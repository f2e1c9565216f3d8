"""Programs as they are lowered for TPUs, on any machine."""

import jax


def text_of(f, *args) -> str:
    return jax.jit(f).trace(*args).lower(lowering_platforms=("tpu",)).as_text()


def kernels(f, *args) -> int:
    """How many there are."""
    return text_of(f, *args).count("@tpu_custom_call")
