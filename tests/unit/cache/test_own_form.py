"""A form in which keys and values are stored that the package does not know, in every cache."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _draw import normal
from jaxtyping import Array
from matrix.oracle import exact

from eqattn import attention, AttentionMetadata, Causal, Ragged
from eqattn.cache import (
    AbstractStored,
    KVCache,
    PagedKVCache,
    Quantized,
    RingBufferCache,
    StackedKVCache,
)


B, T, S, K, D, PAGE = 2, 5, 64, 2, 8, 4


class Shifted(AbstractStored):
    """Numbers that are stored as twice their value plus one, in float16."""

    held: Array

    @property
    def arrays(self):
        return (self.held,)

    @property
    def shape(self):
        return self.held.shape

    @property
    def dtype(self):
        return jnp.dtype("float32")

    def decode(self, *arrays):
        return (arrays[0].astype(jnp.float32) - 1) / 2

    def encode(self, new):
        return ((2 * new + 1).astype(jnp.float16),)


def pair(*lead: int) -> list[Any]:
    return [Shifted(jnp.ones((*lead, K, D), jnp.float16))] * 2


def empty(kind: str) -> Any:
    length = jnp.zeros(B, jnp.int32)
    if kind == "pages":
        table = np.random.default_rng(0).permutation(B * S // PAGE).reshape(B, -1)
        return PagedKVCache(*pair(B * S // PAGE, PAGE), jnp.asarray(table, jnp.int32), length)
    if kind == "layers":
        return StackedKVCache(*pair(3, B, S), jnp.zeros((3, B), jnp.int32)).layer(1)
    if kind == "ring buffer":
        made = RingBufferCache.empty(B, S, K, D)
        return eqx.tree_at(lambda x: (x.key, x.value), made, tuple(pair(*made.key.shape[:2])))
    return KVCache(*pair(B, S), length)


@pytest.mark.parametrize("kind", ["ring buffer", "pages"])
def test_steps_over_an_own_form(kind):
    q, k, v = (normal(i, B, T, n, D) for i, n in enumerate((4, K, K)))
    strategy = Ragged(AttentionMetadata())

    @jax.jit
    def step(cache, q, k, v):
        at = cache.length
        cache = cache.append(k, v)
        mask = Causal() & cache.mask()
        out = attention(
            q, cache.key, cache.value, strategy, mask=mask, q_offset=at,
            kv_positions=cache.positions,
        )  # fmt: skip
        return out.attention_outputs, cache

    cache, found = empty(kind), []
    for part in (slice(0, 3), slice(3, 4), slice(4, T)):
        out, cache = step(cache, q[:, part], k[:, part], v[:, part])
        found.append(out)
    rounded = [np.float64((2 * x + 1).astype(jnp.float16)) / 2 - 0.5 for x in (k, v)]
    seen = np.tril(np.ones((T, T), bool))
    want = exact(q, *rounded, visible=seen)[0]
    np.testing.assert_allclose(np.concatenate(found, 1), want, rtol=0, atol=2e-5)


def test_a_form_that_is_only_read():
    class Read(Shifted):
        encode = AbstractStored.encode

    cache = KVCache(*[Read(x.held) for x in pair(B, S)], jnp.zeros(B, jnp.int32))
    with pytest.raises(NotImplementedError, match=r"Read has no encode\(\), so that no cache"):
        cache.append(*[normal(0, B, 1, K, D)] * 2)


def test_a_form_whose_arrays_are_made_anew():
    """What was written to them would be lost."""

    class Doubled(Shifted):
        @property
        def arrays(self):
            return (self.held + 0,)

    cache = KVCache(*[Doubled(x.held) for x in pair(B, S)], jnp.zeros(B, jnp.int32))
    with pytest.raises(NotImplementedError, match="Doubled are no fields of it, so that none"):
        cache.append(*[normal(0, B, 1, K, D)] * 2)


def test_layers_of_flat_arrays():
    wide = [Quantized.zeros((3, B, S, K, D), jnp.int8, jnp.float32)] * 2
    cache = StackedKVCache(*wide, jnp.zeros((3, B), jnp.int32)).layer(0)
    with pytest.raises(ValueError, match="Quantized has its tokens and heads in one axis.*Paged"):
        cache.key


class Scaled(AbstractStored):
    """Numbers times a factor, with a function and a table that no append may touch."""

    held: Array
    twice: bool
    shape_of: Any
    codes: Any = eqx.field(static=True)
    factor: ClassVar[float] = 2.0

    @property
    def arrays(self):
        return (self.held,)

    @property
    def shape(self):
        return self.shape_of(self.held)

    @property
    def dtype(self):
        return jnp.dtype("float32")

    def decode(self, *arrays):
        return arrays[0]

    def encode(self, new):
        return (new * (self.factor if self.twice else 1.0) + float(self.codes[0]),)


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
def test_an_append_keeps_what_a_form_of_ones_own_holds():
    """Outside of jit, it is an operation after the other: it reads what the class says now."""
    new = jnp.ones((1, 1, K, D))

    def made():
        held = Scaled(jnp.zeros((1, 8, K, D)), True, jnp.shape, np.arange(3.0))
        return KVCache(held, held, jnp.zeros(1, jnp.int32))

    for cache in (made(), made()):  # the second has another table of the same numbers
        cache = cache.append(new, new).append(new, new)
        assert cache.length.tolist() == [2]
        assert cache.key.twice is True and cache.key.shape_of is jnp.shape
    try:
        Scaled.factor = 5.0
        cache = cache.append(new, new).reorder(jnp.array([0]))
    finally:
        Scaled.factor = 2.0
    assert cache.key.held[0, :4, 0, 0].tolist() == [2, 2, 5, 0]
    inside = eqx.filter_jit(lambda cache: cache.append(new, new))(made())
    assert inside.key.twice is True and inside.key.held[0, 0, 0, 0] == 2


def test_an_append_reads_what_the_class_of_a_form_says_now():
    class Times(Shifted):
        factor: ClassVar[float] = 2.0

        def encode(self, new):
            return ((self.factor * new).astype(jnp.float16),)

    new, held = jnp.ones((1, 1, K, D)), Times(jnp.zeros((1, 8, K, D), jnp.float16))
    cache = KVCache(held, held, jnp.zeros(1, jnp.int32)).append(new, new)
    Times.factor = 5.0
    assert cache.append(new, new).key.held[0, :3, 0, 0].tolist() == [2, 5, 0]
