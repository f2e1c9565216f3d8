"""The kernels for TPUs under `Ragged`: caches of any kind, few rows and many. Against the plain
float64 expression of `dense`, and over the features against the oracle of matrix/.
"""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _tpu_compile import compile_all
from _tpu_lowered import text_of
from _tpu_races import without_races
from _tpu_rows import arrays, call, close, dense, kept_as, LENGTHS, seen
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from matrix.cases import covering, name_of, TARGET_LIMITS
from matrix.test_conformance import check

from eqattn import (
    attention,
    AttentionMetadata,
    Carry,
    DenseMask,
    KeyPadding,
    Ragged,
    ragged_flash_attention_kernel,
    SlidingWindow,
)
from eqattn._sweep.block_sizes import BlockRequest, BlockSizes
from eqattn._sweep.grid import GridLayout
from eqattn.kernels.tpu import _decode, TPULowering
from eqattn.kernels.tpu._grid import KernelGrid
from eqattn.kernels.tpu._work_list import in_parts


@pytest.mark.parametrize(
    "t, kv_heads, starts",
    [
        (1, 2, 0),
        (1, 4, np.array([7, 3, 20, 33])),
        (3, 1, 0),
        (70, 2, 0),
        (64, 2, np.array([5, 0, 0, 9])),
    ],
)
def test_rows_of_any_length(t, kv_heads, starts):
    """One new token, a few, and whole prompts: each a form of its own."""
    q, k, v = arrays(t, 8 if t == 64 else 4, kv_heads, keys=80 if t > 3 else 48)
    shown = seen(t, k.shape[1], starts)
    close(call(q, k, v, starts=jnp.asarray(starts), blocksize_k=16), dense(q, k, v, shown))


def test_a_mask_of_pairs_that_heads_share():
    """It has three axes in a block, as keys have, and is no matrix to be multiplied."""
    q, k, v = arrays(3)
    free = np.random.default_rng(0).random((4, 1, 3, 48)) < 0.7
    output = call(q, k, v, mask=DenseMask(jnp.asarray(free)), blocksize_k=16)
    close(output, dense(q, k, v, seen(3, 48) & free[:, 0]))


@pytest.mark.parametrize("stored", [None, jnp.int8, jnp.float8_e4m3fn])
@pytest.mark.parametrize("in_pages", [False, True])
def test_caches(stored, in_pages):
    q, *kv = arrays()
    (k, v), plain = zip(*[kept_as(x, stored, in_pages) for x in kv])
    output = call(q, k, v, mask=SlidingWindow(19, 0), **({} if in_pages else {"blocksize_k": 16}))
    close(output, dense(q, *plain, seen(1, 48, window=19)))


@pytest.mark.parametrize(
    "t, stored, in_pages, cores",
    [(1, None, False, 2), (3, jnp.int8, True, 1), (70, None, False, 1)],
)
def test_races_and_memory_that_nothing_wrote(t, stored, in_pages, cores, monkeypatch):
    """Few rows by two cores, three pages a block and the scales of each, and a prompt."""
    monkeypatch.setattr(_decode, "cores", lambda: cores)
    q, *kv = arrays(t, keys=80 if t > 3 else 48)
    (k, v), plain = zip(*[kept_as(x, stored, in_pages) for x in kv])
    sizes = {} if in_pages else {"blocksize_k": 16}

    def f(*args):
        output = call(*args, **sizes)
        return output.attention_outputs, output.logsumexp

    got, count = without_races(f, q, k, v, cores=cores)
    assert count == 1
    want = dense(q, *plain, seen(t, k.shape[1]))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("in_pages", [False, True])
def test_prompts_over_quantised_caches(in_pages):
    """The kernel of many rows reads scales in another form."""
    q, *kv = arrays(70, keys=80)
    (k, v), plain = zip(*[kept_as(x, jnp.int8, in_pages) for x in kv])
    sizes = {} if in_pages else {"blocksize_k": 16}
    assert kernels(ft.partial(call, platform="tpu", **sizes), q, k, v) == ["eqattn_fold"]
    close(call(q, k, v, **sizes), dense(q, *plain, seen(70, 80)))


def test_unused_slots_may_hold_anything_and_used_ones_reach_their_rows_only():
    q, k, v = arrays()
    hidden = ~seen(1, 48)[:, 0, :, None, None]
    f = ft.partial(call, blocksize_k=16)
    for garbage in (np.nan, np.inf):
        dirty = f(q, np.where(hidden, garbage, k), np.where(hidden, garbage, v))
        np.testing.assert_array_equal(dirty.attention_outputs, f(q, k, v).attention_outputs)
        bad = v.copy()
        bad[0, 5, 1, 3] = garbage  # in a full block; heads 2 and 3 of the first row see it
        nan = np.isnan(np.asarray(f(q, k, bad).attention_outputs)).all(-1)[:, 0]
        assert nan.tolist() == [[False, False, True, True], *[[False] * 4] * 3]


def judged():
    """Every third of the pairwise cases that have these kernels and give first-order gradients:
    each is as good as the others, and the 3-wise array has more of them.
    """
    cases = [{**case, "target": ("tpu_ragged", 1)} for case in covering(2)]
    cases = [c for c in cases if c["transform"] in ("grad", "jit", "vmap_grad")]
    limits = TARGET_LIMITS["tpu_ragged"].items()
    return [c for c in cases if not any(c[axis] in values for axis, values in limits)][::3]


@pytest.mark.parametrize("case", judged(), ids=name_of)
def test_conformance(case):
    """Values and gradients, which run as ordinary loops, within the bound of the oracle."""
    check(case)


def kernels(f, *args) -> list[str]:
    text = text_of(f, *args)
    return [n for n in ("eqattn_decode", "eqattn_fold") for _ in range(text.count(f'"{n}"'))]


def test_found():
    f = lambda *x: call(*x, platform="tpu", blocksize_k=16).attention_outputs
    assert kernels(f, *arrays()) == ["eqattn_decode"]
    assert kernels(f, *arrays(t=80, keys=96)) == ["eqattn_fold"]
    assert kernels(jax.vmap(f), *(x[None] for x in arrays())) == ["eqattn_decode"]


def test_caches_are_read_as_they_lie():
    """Of 8 rows of 65,536 tokens, a gigabyte each for keys and values, nothing is copied."""
    cases = "long rows", "long int8", "long int8 pages"
    for case, got in compile_all("v5e", cases).items():
        assert got.get("kernels") == 1 and got["temporary"] <= 4 * 2**20, got
        assert got["copied"] <= 4 * 2**20, got


def test_live_blocks_are_all_that_is_visited():
    """The list is as long as the live blocks of all rows are many, one for a row without any."""
    table = jnp.asarray([[[1, 1, 2]], [[0, 0, 0]], [[2, 1, 0]]], jnp.int8)
    layout = GridLayout((3, 1, 1, 3), (16, 4), (), (-4, -2, -1), ragged=True)
    grid, work = KernelGrid.of(table, layout, (-4, -3, -2), 2)
    assert int(grid.length) == 3 + 1 + 2
    rows, columns = np.asarray(work) >> 18, (np.asarray(work) >> 4) & (2**14 - 1)
    assert rows[:6].tolist() == [0, 0, 0, 1, 2, 2] and columns[:6].tolist() == [0, 1, 2, 0, 0, 1]


@pytest.mark.parametrize("parts, size", [(2, 8), (3, 12), (4, 24)])
def test_rows_that_cores_share(parts, size, monkeypatch):
    """Stretches of the list, that begin and end within rows and may be empty, merged."""
    cut = []
    monkeypatch.setattr(_decode, "cores", lambda: parts)
    monkeypatch.setattr(_decode, "in_parts", lambda *x: cut.append(in_parts(*x)) or cut[-1])
    q, *kv = arrays(2)
    starts = np.array([0, 0, 20, 3])
    (k, v), plain = zip(*[kept_as(x, jnp.int8, False) for x in kv])
    output = call(q, k, v, starts=jnp.asarray(starts), blocksize_k=size)
    close(output, dense(q, *plain, seen(2, 48, starts)))
    one = jnp.full(1, 48)  # a row of which each core has a part
    metadata = AttentionMetadata(platform="interpret", blocksize_k=size)
    q, k, v = (jnp.asarray(x[:1]) for x in arrays(2))
    output = attention(q, k, v, Ragged(metadata), mask=KeyPadding(one), return_logsumexp=True)
    close(output, dense(q, k, v, np.ones((1, 2, 48), bool)))
    assert len(cut) == 2 and len(cut[0][0]) == parts


@pytest.mark.parametrize("starts", [np.array([0, 0, 0, 0]), np.array([5, 0, 17, 33])])
def test_the_kernel_body_of_ones_own_call(starts):
    b, h, d, s, size = len(LENGTHS), 4, 16, 48, 16
    random = np.random.RandomState(2)
    q, k, v = (random.standard_normal(x).astype(np.float32) for x in
               ((b, h, d), (b, s, d), (b, s, 8)))  # fmt: skip
    hidden = ~seen(1, s, starts)[:, 0]
    k[hidden], v[hidden] = np.nan, np.inf
    whole = lambda *shape: pl.BlockSpec((None, *shape), lambda i, j, *_: (i, 0, 0))
    part = lambda n: pl.BlockSpec((None, size, n), lambda i, j, *_: (i, j, 0))
    result = lambda n: jax.ShapeDtypeStruct((b, h, n), jnp.float32)
    o, m, l = pl.pallas_call(
        ft.partial(ragged_flash_attention_kernel, block_size=size),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(b, s // size),
            in_specs=[whole(h, d), part(d), part(8)],
            out_specs=[whole(h, 8), whole(h, 128), whole(h, 128)],
        ),
        out_shape=[result(8), result(128), result(128)],
        interpret=True,
    )(jnp.asarray(LENGTHS), jnp.asarray(starts), q, k, v)
    carry = Carry(o, l[..., 0], m[..., 0])
    clean = [np.where(hidden[..., None], 0, x)[:, :, None] for x in (k, v)]
    out, logsumexp = dense(q[:, None] * np.sqrt(d), *clean, seen(1, s, starts))
    np.testing.assert_allclose(carry.output(), out[:, 0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(carry.logsumexp(), logsumexp[:, 0], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="mask_value=-10"):
        ragged_flash_attention_kernel(*[None] * 8, block_size=8, mask_value=-10.0)


@pytest.mark.parametrize(
    "given, queries, keys",
    [
        (dict(queries=1), 32, 512),
        (dict(), 256, 256),
        (dict(page_size=64), 128, 256),
        (dict(keys=8203), 256, 256),
        (dict(keys=8203, queries=1), 32, 1024),
        (dict(page_size=64, group=16, head_dim=256, token_nbytes=8192), 16, 512),
        (dict(page_size=64, group=16, queries=128, token_nbytes=512), 64, 512),
    ],
)
def test_blocks_of_few_rows_and_many(given, queries, keys):
    """Of several key heads, in order and in pages, those of many rows have more rows and fewer
    keys. Wide heads in pages are visited by the kernel for few rows, and one key head is not taken
    apart.
    """
    sizes = dict(queries=512, keys=8192, group=32, head_dim=128, in_place=True, itemsize=2)
    request = BlockRequest(dtype=jnp.dtype(jnp.bfloat16), **sizes | dict(token_nbytes=4096) | given)
    assert TPULowering("pallas").choose_blocks(request) == BlockSizes(queries, keys)
