"""The kernels under `Ragged`: rows of unequal length in caches of any kind, few queries and many. What
masks, scores and transforms add is in matrix/, by the targets that end with "_ragged".
"""

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _kernels import (
    ALL,
    dtype_of,
    EACH,
    how,
    kernels,
    newest,
    NVIDIA,
    OF_GPUS,
    OLDER,
    over,
    text_of,
)
from _stored_rows import arrays, cache, call, Doubled, judge, latents, LENGTHS, seen

from eqattn import (
    attention,
    AttentionMetadata,
    Causal,
    DenseMask,
    KeyPadding,
    Ragged,
    SlidingWindow,
)
from eqattn._problem.storage import Stored
from eqattn.cache import Bitcast, LatentKV, Pages, Quantized


GROUPS = dict(t=1, heads=4, kv_heads=2, dim=32, width=32)
EIGHT: dict[str, Any] = dict(stored=jnp.int8)
TPU, TRITON = ("tpu",), ("triton",)
# Who makes the cache, of what, the fields of the call, and whose kernels serve it. A capacity of 256
# tokens in blocks of 16 is shared by several programs a row on GPUs.
CALLS: dict[str, Any] = {
    "one row": (cache, dict(t=1, heads=1, kv_heads=1, dim=16, width=16), {}, OF_GPUS),
    "shared rows": (cache, GROUPS | dict(keys=256), dict(blocksize_k=16), OF_GPUS),
    "drafts": (cache, dict(t=3, heads=6, kv_heads=2, dim=32, width=16), dict(blocksize_k=16), ALL),
    "prompt": (cache, dict(t=40, heads=12, kv_heads=2, dim=16, width=16), {}, ALL),
    "uneven": (
        cache,
        dict(t=2, heads=2, kv_heads=1, dim=16, width=16, dtype=jnp.float16),
        dict(blocksize_k=20),
        OF_GPUS,
    ),
    "pages": (cache, GROUPS | dict(page=16), {}, TPU),
    "shared pages": (cache, GROUPS | dict(page=16, keys=256), {}, OF_GPUS),
    "int8": (cache, GROUPS | EIGHT, {}, ALL),
    "int8 in pages": (cache, GROUPS | EIGHT | dict(page=32, keys=64), {}, ALL),
    "int8 in short pages": (cache, GROUPS | EIGHT | dict(page=16), {}, ("cuda",)),
    "float8": (cache, GROUPS | dict(t=3, heads=3, kv_heads=1, stored=jnp.float8_e4m3fn), {}, ALL),
    "int8 prompt": (cache, GROUPS | EIGHT | dict(t=70, keys=80), {}, TPU),
    "int8 prompt in pages": (cache, GROUPS | EIGHT | dict(t=70, keys=80, page=16), {}, TPU),
    "many blocks of 8 bits": (
        cache,
        GROUPS | dict(t=20, heads=8, kv_heads=1, keys=144, stored=jnp.float8_e5m2),
        dict(blocksize_k=16),
        ("cuda",),
    ),
    "latents": (latents, dict(t=1, heads=4, width=32, rest=16), {}, ALL),
    "latents in pages": (latents, dict(t=2, heads=2, width=16, rest=32, page=16), {}, ALL),
    "latents of 8 bits": (latents, dict(t=1, heads=2, width=32, rest=32) | EIGHT, {}, ALL[:2]),
    # Of DeepSeek's size, whose values two warpgroups add up.
    "long latents": (latents, dict(t=1, heads=4, width=512, rest=64), {}, ("cuda",)),
    "float32": (
        cache,
        dict(t=2, heads=4, kv_heads=2, dim=12, width=5, dtype=jnp.float32),
        {},
        OLDER,
    ),
    "odd pages": (cache, GROUPS | dict(dim=16, width=8, page=6), {}, TRITON),
    "large pages": (cache, GROUPS | dict(page=200, keys=400), {}, TRITON),
    "int8 of odd sizes": (cache, GROUPS | EIGHT | dict(dim=24, width=10), {}, TRITON),
    "latents of odd sizes": (latents, dict(t=1, heads=2, width=40, rest=8) | EIGHT, {}, TRITON),
}
SPOILT = {n: CALLS[n] for n in ("shared rows", "uneven", "float8")}
SPOILT |= {n: (*CALLS[n][:3], ALL) for n in ("pages", "int8", "latents")}
LATER = (
    *("one row", "pages", "int8", "latents", "int8 prompt in pages", "float32", "large pages"),
    "int8 of odd sizes",
)


def made(backend: str, name: str):
    """The arrays of a call, their numbers, and the fields."""
    make, given, fields, _ = CALLS[name]
    return *make(**dict(dtype=dtype_of(backend)) | given), dict(backend=backend) | fields


@over(CALLS, LATER)
def test_caches_of_any_kind(interpreted, name):
    """Of rows of 0 to 48 tokens, and of some that nobody wrote."""
    args, plain, fields = made(interpreted, name)
    judge(args, plain, **fields)


@pytest.mark.parametrize("t, keys", [(1, 48), (70, 80)])
def test_rows_that_begin_later_and_windows(t, keys, interpreted):
    starts = np.array([7, 3, 20, 9])
    args, plain = cache(t, 4, 2, 32, 32, keys, dtype_of(interpreted))
    fields: Any = dict(backend=interpreted, blocksize_k=16, mask=SlidingWindow(19, 0))
    visible = seen(t, keys, starts, window=19)
    judge(args, plain, visible, starts=jnp.asarray(starts), **fields)


def test_a_mask_of_pairs_that_heads_share():
    """It has three axes in a block, as keys have, and is no matrix to be multiplied."""
    args, plain = cache(3, 4, 2, 16, 8, dtype=jnp.float32)
    free = np.random.default_rng(0).random((4, 1, 3, 48)) < 0.7
    visible = seen(3, 48) & free[:, 0]
    judge(args, plain, visible, mask=DenseMask(jnp.asarray(free)), blocksize_k=16)


def spoiled(x, number, where):
    """A cache with a number that is not finite at some tokens and heads, `[rows, tokens, heads]`, as
    the last feature; where numbers have 8 bits, in their scales, and in them if they can hold it.
    """
    where = jnp.asarray(where)
    if isinstance(x, LatentKV):
        return LatentKV(*(spoiled(part, number, where) for part in (x.c_kv, x.k_rope)))
    if isinstance(x, Stored):
        return spoiled(x.array, number, where)
    if isinstance(x, Pages):
        table = np.asarray(x.table)
        back = where.reshape(table.size, -1, where.shape[-1])[np.argsort(table.reshape(-1))]
        return Pages(spoiled(x.content, number, back), x.table)
    if isinstance(x, Quantized):
        values = x.values
        if jnp.issubdtype(values.dtype, jnp.floating):
            values = spoiled(values, jnp.nan, where)
        scales = jnp.where(where.reshape(x.scales.shape), number, x.scales)
        return Quantized(values, scales, x.dtype)
    spoilt = jnp.where(where, jnp.asarray(number).astype(x.dtype), x[..., -1])
    return x.at[..., -1].set(spoilt)


@over(SPOILT, ("uneven", "float8", "pages"))
def test_what_is_not_finite_reaches_its_rows(interpreted, name):
    """No other row changes by a bit. Tokens behind the last one are seen by no query, and the last
    one by the last query only.
    """
    (q, k, v), _, fields = made(interpreted, name)
    given, t = CALLS[name][1], q.shape[1]

    @jax.jit
    def run(q, k, v):
        output = call(q, k, v, **fields)
        return output.attention_outputs, output.logsumexp

    shown, fine = seen(t, given.get("keys", 48)), run(q, k, v)
    hidden = np.repeat(~shown.any(1)[..., None], given.get("kv_heads", 1), axis=2)
    spoil = lambda x, *where: x if x is None else spoiled(x, *where)
    for number in (jnp.nan, jnp.inf):
        found = run(q, *(spoil(x, number, hidden) for x in (k, v)))
        for x, y in zip(found, fine):
            np.testing.assert_array_equal(x, y)
    heads = np.arange(q.shape[2]) >= q.shape[2] // hidden.shape[2] * (hidden.shape[2] - 1)
    for token in (LENGTHS[0] - 1, 0):  # of the first row, in a block with and without a mask
        one = np.zeros_like(hidden)
        one[0, token, -1] = True
        bad = (spoil(k, jnp.nan, one), v) if v is None else (k, spoil(v, jnp.inf, one))
        out, _ = run(q, *bad)
        sees = np.zeros(out.shape[:3], bool)
        sees[0] = shown[0, :, token, None] & heads
        assert sees.any() and np.isnan(np.float32(out)[sees]).all()
        np.testing.assert_array_equal(np.float32(out)[~sees], np.float32(fine[0])[~sees])


@pytest.mark.parametrize("keys", [48, 256])
def test_a_row_is_not_a_number_as_a_whole(keys, interpreted):
    """Where every query sees every key there is nothing to clean, in one program or in several."""
    (q, k, v), _ = cache(2, 4, 2, 32, 32, keys)
    strategy = how(interpreted, strategy=Ragged, runtime_dtype=q.dtype, blocksize_k=16)
    run = jax.jit(lambda *xs: attention(*xs, strategy).attention_outputs)
    nan = np.isnan(np.float32(run(q, k, v.at[0, 5, 1, 3].set(jnp.inf))))
    assert nan[0, :, 2:].all() and nan.sum() == nan[0, :, 2:].size


PLATFORMS = {"tpu": "tpu", "cuda": "gpu", "triton": "triton"}


def asked(backend: str, *args, **fields):
    """The output where the device of the kernels is."""
    given = dict(platform=PLATFORMS[backend]) | ({"backend": "cuda"} if backend == "cuda" else {})
    return call(*args, **given, **fields).attention_outputs


@EACH
@pytest.mark.parametrize("page", [0, 32])
def test_one_kernel_decodes(page, backend):
    """It copies no keys, waits for nothing that the host would decide, and its gradients run as XLA
    code.
    """
    run = lambda *xs: asked(backend, *xs, **({} if page else dict(blocksize_k=64)))
    args, _ = cache(1, 4, 2, 64, 64, 128, dtype_of(backend), page=page)
    text = text_of(backend, run, *args)
    assert kernels(backend, run, *args) == 1
    decided = ("stablehlo.case", "stablehlo.if", "stablehlo.while")
    assert backend == "tpu" or not [x for x in decided if x in text]
    assert kernels(backend, jax.grad(lambda *xs: run(*xs).astype(jnp.float32).sum()), *args) == 1
    if not page:
        assert kernels(backend, jax.vmap(run), *jax.tree.map(lambda x: x[None], args)) == 1


def test_tpus_have_a_kernel_for_few_rows_and_one_for_many():
    run = lambda *xs: asked("tpu", *xs, blocksize_k=16)
    for t, name in ((1, "eqattn_decode"), (70, "eqattn_fold")):
        for stored in (None, jnp.int8):
            args, _ = cache(t, 4, 2, 16, 8, 80, jnp.float32, stored=stored)
            assert re.findall(r'"(eqattn_\w+)"', text_of("tpu", run, *args)) == [name]


@NVIDIA
@pytest.mark.parametrize("keys, page", [(48, 0), (80, 0), (100, 0), (100, 20)])
def test_capacities_that_64_does_not_divide(keys, page, backend):
    """The compiler of Hopper takes tiles of 48 keys and of 16, and reads no pages of 20."""
    if backend == "cuda" and keys == 100:
        pytest.skip("copies of Hopper begin at multiples of 8 tokens")
    args, _ = cache(1, 4, 2, 64, 64, keys, page=page)
    assert kernels(backend, lambda *xs: asked(backend, *xs), *args) == 1


@EACH
def test_training_has_kernels_for_gradients(backend):
    """Of rows of unequal length, whose keys are arrays."""
    q, k, v = arrays(64, 4, 2, 64, 64, 128, jnp.bfloat16)
    fields: Any = dict(platform="pallas", backend=backend, runtime_dtype=q.dtype)
    strategy = Ragged(AttentionMetadata(**fields))

    def loss(*xs):
        output = attention(*xs, strategy, mask=Causal() & KeyPadding(jnp.asarray(LENGTHS)))
        return output.attention_outputs.astype(jnp.float32).sum()

    assert kernels(backend, jax.grad(loss, (0, 1, 2)), q, k, v) == (2 if backend == "tpu" else 3)


@newest
def test_latents_are_one_operand():
    args, _ = latents(1, 4, 32, 16, 128)
    text = text_of("cuda", lambda *xs: asked("cuda", *xs), *args)
    (line,) = [x for x in text.splitlines() if "@mosaic_gpu_v2" in x]
    assert line.count("4x128x32xbf16") == 1


WHOLE: Any = jnp.ones((4, 48, 2, 32), jnp.bfloat16)
WIDE: Any = jnp.ones((4, 48, 2, 264), jnp.bfloat16)
HALF = Quantized.quantize(WHOLE.astype(jnp.float16))
OWN = (
    ("its values are stored in a way of their own", lambda q, k, v: (q, WHOLE, Doubled(WHOLE))),
    ("its keys are stored in a way of their own", lambda q, k, v: (q, Doubled(WHOLE), WHOLE)),
    ("values are bfloat16 and int8", lambda q, k, v: (q, k, WHOLE)),
)
REFUSED: dict[str, Any] = {
    "cuda": (
        *OWN,
        ("multiples of 16 numbers, not 12 and 32", lambda q, *_: (q[..., :12], WHOLE[..., :12], WHOLE)),
        ("bfloat16 and float16, not float32", lambda *_: arrays()),
        ("queries are bfloat16 where keys have 8 bits", lambda q, *_: (q.astype(HALF.dtype), HALF, HALF)),
        ("multiples of 32 numbers, not 16 and 32", lambda q, k, v: (q[..., :16], Quantized.quantize(WHOLE[..., :16]), v)),
    ),
    "triton": (
        *OWN,
        ("up to 256 numbers, not 264 and 264", lambda *_: (WIDE[:, :1], WIDE, WIDE)),
        ("its keys are eqattn.cache.Bitcast; .* bits=False", lambda q, *_: (q, Bitcast.of(WHOLE), Bitcast.of(WHOLE))),
    ),
}  # fmt: skip


@NVIDIA
def test_what_there_is_no_kernel_for(backend):
    """Who does not ask runs XLA code."""
    args, _ = cache(1, 4, 2, 32, 32, stored=jnp.int8)
    for said, given in REFUSED[backend]:
        with pytest.raises(ValueError, match=f"no kernel .*{said}"):
            kernels(backend, lambda *xs: asked(backend, *xs), *given(*args))
    paged, _ = cache(1, 4, 2, 64, 64, page=16)
    q, k, v = paged
    for keys in ((k, v.materialise()), (k.materialise(), v)):
        with pytest.raises(ValueError, match="only its keys or only its values lie in pages"):
            kernels(backend, lambda *xs: asked(backend, *xs), q, *keys)
    automatic = Ragged(AttentionMetadata(backend=backend))
    assert kernels(backend, lambda *xs: attention(*xs, automatic).attention_outputs, *args) == 0
    platform: Any = PLATFORMS[backend]
    assert Ragged(AttentionMetadata(platform=platform)).supports(mask=KeyPadding(LENGTHS))


@pytest.mark.parametrize("page", [0, 32])
@pytest.mark.parametrize("mapped", ["values", "scales"])
def test_scales_lie_as_their_numbers(page, mapped):
    """They would be read at the places of these, and `vmap` may map either alone."""
    (q, k, v), _ = cache(1, 4, 2, 32, 32, 64, page=page, stored=jnp.int8)
    where = lambda x: getattr(x.content if page else x, mapped)
    run = lambda x: asked("triton", q, eqx.tree_at(where, k, x), v)
    with pytest.raises(ValueError, match="its numbers and their scales vary with other axes"):
        kernels("triton", jax.vmap(run), jnp.stack([where(k)] * 2))
    # A cache that is mapped as a whole is right.
    both = jax.tree.map(lambda x: jnp.stack([x, x]), (k, v))
    run = lambda k, v: call(q, k, v, backend="triton").attention_outputs
    found, want = jax.jit(jax.vmap(run))(*both), jax.jit(run)(k, v)
    np.testing.assert_array_equal(found, jnp.stack([want, want]))
