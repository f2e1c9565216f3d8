"""Low-rank adapters of the attention projections, and documents packed into rows."""

from collections.abc import Iterable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from eqattn.nn import LatentAttention, MultiheadAttention

from .decoder import Decoder


class LoRA(eqx.Module):
    """`base(x) + scale * up @ down @ x` (Hu et al., arXiv:2106.09685). `up` begins as zeros, so an
    adapted model begins as the model that it adapts.
    """

    base: eqx.nn.Linear
    down: Float[Array, "rank inputs"]
    up: Float[Array, "outputs rank"]
    scale: float = eqx.field(static=True)

    def __init__(self, base: eqx.nn.Linear, rank: int, scale: float, key: PRNGKeyArray):
        outputs, inputs = base.weight.shape
        self.base, self.scale = base, scale
        self.down = jax.random.normal(key, (rank, inputs)) / np.sqrt(inputs)
        self.up = jnp.zeros((outputs, rank))

    def __call__(self, x: Float[Array, " inputs"], *, key: Any = None) -> Float[Array, " outputs"]:
        del key  # eqx.nn.Sequential passes one
        down, up = self.down.astype(x.dtype), self.up.astype(x.dtype)
        return self.base(x) + self.scale * (up @ (down @ x))

    def merged(self) -> eqx.nn.Linear:
        """One layer that computes the same."""
        change = (self.scale * self.up @ self.down).astype(self.base.weight.dtype)
        return eqx.tree_at(lambda m: m.weight, self.base, self.base.weight + change)


def _is(*kinds: type) -> Any:
    return lambda x: isinstance(x, kinds)


def adapt(model: Decoder, rank: int, scale: float, key: PRNGKeyArray) -> Decoder:
    """The model with an adapter at each projection that its attention layers call."""
    keys = iter(jax.random.split(key, 1000))

    def wrap(x: Any) -> Any:
        return LoRA(x, rank, scale, next(keys)) if isinstance(x, eqx.nn.Linear) else x

    def attention(x: Any) -> Any:
        if not isinstance(x, MultiheadAttention | LatentAttention):
            return x
        adapted = jax.tree.map(wrap, x, is_leaf=_is(eqx.nn.Linear))
        if isinstance(x, MultiheadAttention):
            return adapted
        # The absorbed form calls neither: it multiplies their weights by queries and by results.
        return eqx.tree_at(lambda m: (m.k_b_proj, m.v_b_proj), adapted, (x.k_b_proj, x.v_b_proj))

    return jax.tree.map(attention, model, is_leaf=_is(MultiheadAttention, LatentAttention))


def merge(model: Decoder) -> Decoder:
    """The adapted model without adapters: its projections have taken them in."""
    done = lambda x: x.merged() if isinstance(x, LoRA) else x
    return jax.tree.map(done, model, is_leaf=_is(LoRA))


def split(model: Decoder) -> tuple[Decoder, Decoder]:
    """The adapters, which are trained, and the rest, as `eqx.partition` gives them."""

    def trained(x: Any) -> Any:
        if not isinstance(x, LoRA):
            return False
        none = jax.tree.map(lambda _: False, x)
        return eqx.tree_at(lambda m: (m.down, m.up), none, (True, True))

    return eqx.partition(model, jax.tree.map(trained, model, is_leaf=_is(LoRA)))


Packed = tuple[Int[np.ndarray, "rows t"], ...]  # tokens, positions and segments


def pack(documents: Iterable[Sequence[int]], length: int) -> Packed:
    """Documents one after the other in rows of `length` tokens; those that are longer are cut.
    Positions begin at 0 in each part. Segments count the parts in a row; -1 is no token.
    """
    rows: list[list[tuple[int, int, int]]] = [[]]
    for document in documents:
        for start in range(0, len(document), length):
            part = document[start : start + length]
            if len(rows[-1]) + len(part) > length:
                rows.append([])
            segment = rows[-1][-1][2] + 1 if rows[-1] else 0
            rows[-1] += [(token, i, segment) for i, token in enumerate(part)]
    filled = [row + [(0, 0, -1)] * (length - len(row)) for row in rows if row]
    tokens, positions, segments = (
        np.array(filled, np.int32).reshape(-1, length, 3).transpose(2, 0, 1)
    )
    return tokens, positions, segments


def packed_loss(model: Decoder, packed: Packed) -> Float[Array, ""]:
    """The mean loss of each token that follows another of its document."""
    tokens, positions, segments = packed
    logits = jax.vmap(model)(tokens, positions, segments)
    log_p = jax.nn.log_softmax(logits[:, :-1])
    log_p = jnp.take_along_axis(log_p, tokens[:, 1:, None], -1)[..., 0]
    counted = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] >= 0)
    return -jnp.where(counted, log_p, 0.0).sum() / counted.sum().astype(jnp.float32)
