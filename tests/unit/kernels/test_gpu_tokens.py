"""The kernels for NVIDIA GPUs read and write tokens where they lie, of any lengths and groups."""

import functools as ft
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _gpu_lowered import first_visits, text_of
from matrix import bound, oracle, oracle_masks as om
from matrix.cases import covering, invalid
from matrix.test_conformance import check

from eqattn import attention, AttentionMetadata, Blockwise, Causal, SlidingWindow


pytestmark = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="the kernel is written for jax 0.12 and newer"
)


def attend(q, k, v, **kw):
    mask = kw.pop("mask", Causal())
    fields = dict(runtime_dtype=jnp.bfloat16, backend="cuda") | kw
    strategy = Blockwise(AttentionMetadata(**fields))
    return attention(q, k, v, strategy, mask=mask).attention_outputs


def calls(text: str) -> list[tuple[list[str], list[str]]]:
    """The types of the operands and of the results of each kernel that visits first."""
    found = []
    for line in first_visits(text):
        given, _, out = line.rpartition(" : ")[2].partition("->")
        found.append(tuple(re.findall(r"tensor<([^>]*)>", x) for x in (given, out)))
    return found


@pytest.mark.parametrize("tokens, dim, kept", [(264, 64, (264, 64)), (261, 72, (264, 128))])
def test_tokens_are_read_and_written_where_they_lie(tokens, dim, kept):
    """Or padded there, where the compiler cannot read lengths and sizes as they are."""
    sizes = [(2, tokens, h, dim) for h in (4, 2, 2, 4)]
    q, k, v, g = (jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in sizes)
    call = ft.partial(attend, platform="gpu")
    gradients = lambda q, k, v, g: jax.vjp(call, q, k, v)[1](g)
    fold, *sums = calls(text_of(gradients, q, k, v, g))
    of_rows, of_keys = (f"2x{kept[0]}x{h}x{kept[1]}xbf16" for h in (4, 2))
    assert fold[0][:3] == [of_rows, of_keys, of_keys] and fold[1][:2] == [of_rows] * 2
    assert sorted(found for _, out in sums for found in out if "bf16" in found) == [of_keys] * 2 + [
        of_rows
    ]
    for given, _ in sums:
        assert given[:4].count(of_rows) == given[:4].count(of_keys) == 2


def test_a_single_block_has_any_length():
    """The compiler wants to know that copies begin at multiples of 8 tokens."""
    q, k, v = (jax.ShapeDtypeStruct((2, n, 2, 16), jnp.bfloat16) for n in (70, 90, 90))
    call = ft.partial(attend, platform="gpu")
    gradients = lambda q, k, v: jax.vjp(call, q, k, v)[1](q)
    assert len(calls(text_of(gradients, q, k, v))) == 3


@pytest.mark.parametrize("tokens, kv_heads", [(512, 2), (264, 4)])
def test_the_compiler_copies_nothing_for_them(tokens, kv_heads, monkeypatch):
    """What kernels read is an argument of the program or the result of another, and what the caller
    gets is theirs. The compiler is that of CPUs, and what stands in for a kernel has its operands
    and its results.
    """
    from eqattn.kernels.gpu import _mosaic

    def kernel(body, out, *more, **options):
        like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in out]
        return lambda *xs: jax.pure_callback(lambda *ys: like, like, *xs)

    monkeypatch.setattr(_mosaic, "kernel", kernel)
    monkeypatch.setattr(_mosaic, "alone", lambda fn: fn)
    monkeypatch.setattr(_mosaic, "in_place", lambda run, xs: xs)
    shapes = [(1, tokens, h, 64) for h in (4, kv_heads, kv_heads, 4)]
    q, k, v, g = (jax.ShapeDtypeStruct(x, jnp.float16) for x in shapes)
    call = ft.partial(attend, platform="interpret", runtime_dtype=jnp.float16)
    gradients = lambda q, k, v, g: jax.vjp(call, q, k, v)[1](g)
    for f, args, count in ((call, (q, k, v), 1), (gradients, (q, k, v, g), 3)):
        text = jax.jit(f).lower(*args).compile().as_text()
        entry = text[text.index("ENTRY") :].splitlines()
        kernels = [x for x in entry if " custom-call(" in x]
        assert len(kernels) == count
        reads = [x for x in entry if x in kernels or "ROOT" in x]
        found = re.compile(r"(%[\w.]+) = f16\[\d+,[^ ]* (?:fusion|copy|transpose|pad)\(")
        copies = [match[1] for line in entry if (match := found.search(line))]
        read = [re.search(re.escape(x) + r"[,) ]", " ".join(reads)) for x in copies]
        assert not any(read), reads


PLAIN = covering(2)[0] | dict.fromkeys(
    ("bias", "score", "sinks", "cap", "scale", "offset", "mask"), "none"
)
PLAIN |= dict(operands="default", lead=(), dtype="bfloat16", target=("gpu", 1), dropout=0.0)


@pytest.mark.parametrize(
    "case",
    [
        # Rows of a block that are no whole tiles, tokens and features that end within one.
        dict(heads=(6, 2), block=(32, 64), length=(70, 130), dims=(16, 8), mask="causal"),
        # Later rows, which have more to do, are written first, and not again with those before.
        dict(heads=(2, 2), block=(64, 64), length=(130, 130), dims=(72, 24), mask="causal"),
        # Blocks that begin at odd places are copied.
        dict(heads=(2, 1), block=(24, 40), length=(70, 90), dims=(16, 8), mask="window"),
    ],
    ids=str,
)
@pytest.mark.parametrize("transform", ["jit", pytest.param("grad", marks=pytest.mark.slow)])
def test_values(case, transform):
    case = PLAIN | case | dict(transform=transform)
    assert invalid(case) is None
    check(case)


@pytest.mark.parametrize("tokens", [5, 200])
def test_few_and_many_tokens(tokens):
    """Of one block, and of several, the last of which is not whole."""
    q, k, v = (jax.random.normal(x, (1, tokens, 2, 64), jnp.bfloat16)
               for x in jax.random.split(jax.random.key(0), 3))  # fmt: skip
    mask = SlidingWindow(90, 0)
    got = jax.jit(ft.partial(attend, platform="interpret", mask=mask))(q, k, v)
    wide: Any = [np.asarray(x).astype(np.float64) for x in (q, k, v)]
    visible = om.window(tokens, tokens, 90, 0)
    problem = oracle.Problem(*wide, scale=1 / 8, mask=visible)
    np.testing.assert_allclose(got.astype(jnp.float32), oracle.forward(problem).out, atol=2e-2)


@pytest.mark.parametrize("tokens, block", [(192, 192), (200, 128)])
def test_gradients_by_large_tiles(tokens, block):
    """Tiles of 128 are for blocks that they fill. In one of 192 tokens for two heads, the second
    would begin with one head and end with the other.
    """
    shapes = [(1, tokens, h, 16) for h in (2, 1, 1, 2)]
    q, k, v, g = (
        jax.random.normal(jax.random.key(i), x, jnp.bfloat16) for i, x in enumerate(shapes)
    )
    more: Any = dict(platform="interpret", mask=Causal(), blocksize_q=block, blocksize_k=block)
    found = jax.jit(lambda *xs: jax.vjp(ft.partial(attend, **more), *xs[:3])[1](xs[3]))(q, k, v, g)
    wide: Any = [np.asarray(x).astype(np.float64) for x in (q, k, v)]
    problem = oracle.Problem(*wide, scale=1 / 4, mask=om.causal(tokens, tokens))
    want = bound.grads(
        problem, np.float64(g), np.zeros((1, tokens, 2)), bound.precision_of(jnp.bfloat16)
    )
    for name, x in zip("qkv", found):
        assert bound.excess(np.asarray(x), want[name]) <= 1, name
