"""The calls of training that the reports on kernels for GPUs compile."""

from typing import Any


def training(
    place: Any, given: dict[str, Any], platform: str = "gpu"
) -> tuple[Any, tuple, Any, tuple]:
    """A call and its gradients: functions, each with its arguments."""
    import jax
    import jax.numpy as jnp

    from .. import attention, AttentionMetadata, Blockwise

    tokens, dim = given.pop("tokens", 4096), given.pop("dim", 128)
    width, kv_heads = given.pop("width", dim), given.pop("kv_heads", 8)
    dtype = jnp.dtype(given.pop("dtype", "bfloat16"))
    fields = dict(logits_soft_cap=given.pop("cap", None), dropout_prob=given.pop("rate", 0.0))
    how = Blockwise(AttentionMetadata(platform=platform, runtime_dtype=dtype, **fields))
    heads = {"q": (8, dim), "k": (kv_heads, dim), "v": (kv_heads, width), "g": (8, width)}
    shapes = {x: (1, tokens, *n) for x, n in heads.items()}
    if learned := given.pop("learned", 0):  # the heads of a bias that is an argument
        shapes = {"bias": (1, learned, tokens, tokens)} | shapes
    *bias, q, k, v, g = (jax.ShapeDtypeStruct(x, dtype, sharding=place) for x in shapes.values())

    def call(q, k, v, *bias):
        more = given | {"bias": bias[0]} if bias else given
        return attention(q, k, v, how, **more).attention_outputs

    gradients = lambda g, *xs: jax.vjp(call, *xs)[1](g)
    return call, (q, k, v, *bias), gradients, (g, q, k, v, *bias)
