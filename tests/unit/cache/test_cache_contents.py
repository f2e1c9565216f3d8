"""What caches hold, looked at directly: no attention hides what lies in the wrong place."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _caches import B, CAPACITY, D, K, MAKE, paged, V

from eqattn.cache import KVCache, PagedKVCache, RingBufferCache, StackedKVCache


def numbered(t, first=1):
    """Keys and values that say which token of which row they are: `100 row + token`."""
    numbers = 100.0 * np.arange(B)[:, None] + first + np.arange(t)
    one = lambda size: jnp.asarray(
        np.broadcast_to(numbers[..., None, None], (B, t, K, size)), float
    )
    return one(D).astype(jnp.float32), one(V).astype(jnp.float32)


def content(x):
    """The number of each token, `[b, s]`; every head and feature says the same."""
    x = np.asarray(x)
    assert (x == x[..., :1, :1]).all()
    return x[..., 0, 0].tolist()


COUNTS = jnp.array([3, 0, 2], jnp.int32)


def test_a_ring_buffer_takes_only_counts():
    cache = RingBufferCache.empty(B, 4, K, D, V).append(*numbered(3), COUNTS)
    assert cache.length.tolist() == [3, 0, 2]
    held = [[0, 1, 2, -1], [-1] * 4, [0, 1, -1, -1]]
    assert cache.held.tolist() == held and cache.positions.tolist() == held
    want = [[1, 2, 3, 0], [0, 0, 0, 0], [201, 202, 0, 0]]
    assert content(cache.key) == content(cache.value) == want
    cache = cache.append(*numbered(3, first=11), jnp.array([3, 1, 0], jnp.int32))
    assert cache.held.tolist() == [[4, 5, 2, 3], [0, -1, -1, -1], [0, 1, -1, -1]]
    assert content(cache.key) == [[12, 13, 3, 11], [111, 0, 0, 0], [201, 202, 0, 0]]
    assert cache.length.tolist() == [6, 1, 2]


def test_a_ring_buffer_forgets_drafts_and_what_they_overwrote():
    cache = RingBufferCache.empty(B, 4, K, D, V).append(*numbered(3))
    cache = cache.append(*numbered(2, first=4)).truncate(jnp.array([4, 5, 0]))
    assert cache.held.tolist() == [[-1, 1, 2, 3], [4, 1, 2, 3], [-1] * 4]
    assert cache.length.tolist() == [4, 5, 0]


@pytest.mark.parametrize("rows", [[2, 0, 1], [1, 1, 0]])
def test_a_ring_buffer_reorders_all_that_it_has(rows):
    cache = RingBufferCache.empty(B, 4, K, D, V).append(*numbered(3), COUNTS)
    moved = cache.reorder(jnp.array(rows))
    for x, y in zip(jax.tree.leaves(moved), jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(x, np.asarray(y)[rows])


def test_a_cache_takes_only_counts():
    cache = KVCache.empty(B, 4, K, D, V).append(*numbered(3), COUNTS)
    assert content(cache.key) == [[1, 2, 3, 0], [0] * 4, [201, 202, 0, 0]]
    cache = cache.append(*numbered(2, first=11), jnp.array([1, 2, 0], jnp.int32))
    assert content(cache.value) == [[1, 2, 3, 11], [111, 112, 0, 0], [201, 202, 0, 0]]
    assert cache.length.tolist() == [4, 2, 2]


@pytest.mark.parametrize("name", ["dense", "int8"])
def test_a_cache_reorders_all_that_it_has(name):
    cache = MAKE[name](jnp.float32).append(*numbered(3), COUNTS)
    moved = cache.reorder(jnp.array([2, 2, 0]))
    for x, y in zip(jax.tree.leaves(moved), jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(x, np.asarray(y)[np.array([2, 2, 0])])


def test_a_layer_writes_to_no_other():
    stacked = StackedKVCache.empty(3, B, 64, K, D, V)
    after = stacked.layer(1).append(*numbered(3), COUNTS).stack
    for layer in (0, 2):
        assert not after.key[layer].any() and not after.value[layer].any()
    assert content(after.key[1, :, :4]) == [[1, 2, 3, 0], [0] * 4, [201, 202, 0, 0]]
    assert after.length.tolist() == [[0, 0, 0], [3, 0, 2], [0, 0, 0]]
    # A layer reads what is its own.
    for layer, own in ((0, 0), (1, 1), (2, 0)):
        for x in (after.layer(layer).key, after.layer(layer).value):
            want = np.array([[1, 2, 3, 0], [0] * 4, [201, 202, 0, 0]]) * own
            np.testing.assert_array_equal(np.asarray(x.materialise())[:, :4, 0, 0], want)


@pytest.mark.parametrize("stored", [None, jnp.int8])
def test_pages_hold_only_counts(stored):
    """Tokens beyond `counts`, and of rows without a page, are written nowhere: page 0 is some
    row's, and so is the last.
    """
    cache = PagedKVCache.empty(B, 8, 5, 2, K, D, V, stored=stored)
    table = jnp.array([[3, 0, -1, -1], [4, -1, -1, -1], [2, 1, -1, -1]], jnp.int32)
    cache = eqx.tree_at(lambda c: c.table, cache, table)
    cache = cache.append(*numbered(3), COUNTS)
    read = lambda x: x if stored is None else x.values.astype(jnp.float32) * 1.0
    filled = lambda x: (np.asarray(read(x))[..., 0, 0] != 0).tolist()
    want = [[True, False], [False, False], [True, True], [True, True], [False, False]]
    assert filled(cache.key_pages) == filled(cache.value_pages) == want
    if stored is None:
        assert content(cache.key_pages) == [[3, 0], [0, 0], [201, 202], [1, 2], [0, 0]]
    cache = cache.append(*numbered(2, first=11), jnp.array([1, 2, 1], jnp.int32))
    if stored is None:
        want = [[3, 11], [211, 0], [201, 202], [1, 2], [111, 112]]
        assert content(cache.key_pages) == content(cache.value_pages) == want
    else:
        scales = np.asarray(cache.key_pages.scales).reshape(5, 2, K) * 127
        want = np.array([[3, 11], [211, 0], [201, 202], [1, 2], [111, 112]])
        np.testing.assert_allclose(scales, want[..., None].repeat(K, -1), rtol=1e-6)
    assert cache.length.tolist() == [4, 2, 3]


@pytest.mark.parametrize("name", MAKE)
def test_truncate_only_shortens(name):
    """To more tokens than there are, or to less than none, raises; to as many changes nothing."""
    _, *new = (None, *numbered(3))
    cache = MAKE[name](jnp.float32).append(*new, COUNTS)
    for lengths in ([4, 0, 2], [3, 1, 2], [3, 0, -1]):
        with pytest.raises(Exception, match="cannot be truncated"):
            jax.block_until_ready(cache.truncate(jnp.array(lengths)).length)
    assert cache.truncate(cache.length).length.tolist() == [3, 0, 2]
    assert cache.truncate(jnp.array([2, 0, 0])).length.tolist() == [2, 0, 0]


def test_pages_are_taken_and_given_back():
    cache = PagedKVCache.empty(B, CAPACITY, 20, 4, K, D, V)
    cache = cache.reserve(jnp.array([5, 0, 4]))
    taken = [(row >= 0).sum() for row in np.asarray(cache.table)]
    assert taken == [2, 0, 1]
    used = np.asarray(cache.table)[np.asarray(cache.table) >= 0]
    assert len(set(used.tolist())) == 3
    cache = cache.append(*numbered(4), jnp.array([4, 0, 4], jnp.int32)).reserve(1)
    assert [(row >= 0).sum() for row in np.asarray(cache.table)] == [2, 1, 2]
    more = np.asarray(cache.table)
    assert set(used.tolist()) < set(more[more >= 0].tolist()) and len(set(more[more >= 0])) == 5
    np.testing.assert_array_equal(more[0, :2], used[:2])
    freed = cache.release(jnp.array([0]))
    assert freed.length.tolist() == [0, 0, 4] and (np.asarray(freed.table[0]) == -1).all()
    freed = cache.release(jnp.array([False, False, True]))
    assert freed.length.tolist() == [4, 0, 0] and (np.asarray(freed.table[2]) == -1).all()
    with pytest.raises(ValueError, match="pages of 4 tokens are needed"):
        PagedKVCache.empty(B, CAPACITY, 2, 4, K, D, V).reserve(4)
    with pytest.raises(ValueError, match="was made for 24 a row"):
        cache.reserve(jnp.array([21, 0, 0]))


def test_rows_of_pages_are_reordered_with_their_lengths():
    cache = paged().append(*numbered(3), COUNTS)
    moved = cache.reorder(jnp.array([2, 0, 1]))
    assert moved.length.tolist() == [2, 3, 0]
    np.testing.assert_array_equal(moved.table, cache.table[jnp.array([2, 0, 1])])
