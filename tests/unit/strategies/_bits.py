"""Rows of attention, and the arrangements in which each of them must have the same bits.

A row is a dictionary of arrays, and so is what a call returns of it, its gradients by the names of
what they belong to. `AXES` says which axes of each array are those of queries and of keys, so that
one function cuts rows and results, and one joins them.

Arrays are NumPy's, and shapes are few: what takes time is then the calls themselves.
"""

import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401, which names bfloat16 for NumPy
import numpy as np

from eqattn import (
    ALiBi,
    attention,
    AttentionMetadata,
    Blockwise,
    Causal,
    ChunkedCausal,
    KeyPadding,
    PrefixLM,
    Ragged,
    ScoreFn,
    Segments,
    SlidingWindow,
    T5Bias,
)
from eqattn._problem.storage import as_stored
from eqattn.cache import LatentKV, Pages, Quantized


QUERIES, KEYS = 0, 1
AXES = dict(q=(1, None), ct=(1, None), ct_lse=(1, None), q_ids=(1, None), bias=(2, 3))
AXES |= dict(k=(None, 1), v=(None, 1), k_ids=(None, 1), out=(1, None), lse=(1, None))
OF_ROWS = "out", "lse", "q", "bias"
KINDS = "batch", "padding", "capacity", "layout", "chunks", "decode"
ALL = "together", "chunks", "decode"

Arrays = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A kind of call.

    **Arguments:**

    - `features`: a function of a row and of what all rows share that returns keyword arguments of
        `attention` and, under the name `metadata`, fields of the metadata.
    - `t`, `s`, `h`, `k`, `d`, `v`, `block`: the numbers of queries, keys, query heads, key heads and
        features of keys and values, and the sizes of a block.
    - `rows`: how many rows each arrangement has, but for that of a row alone.
    - `stored`: how `Ragged` holds keys and values: `""` as arrays, `"int8"`, or `"latent"`.
    - `more`: by how many keys a larger cache is larger. Pages are as large as blocks of keys, which
        divide all numbers of keys.
    - `placed`: whether the place of a row in the batch is a part of what is computed.
    """

    features: Callable[[Arrays, Arrays], Arrays]
    t: int = 20
    s: int = 24
    h: int = 4
    k: int = 2
    d: int = 16
    v: int = 16
    block: tuple[int, int] = (8, 8)
    rows: int = 3
    stored: str = ""
    placed: bool = False
    more: int = 48


def window(x: Arrays, _: Arrays) -> Arrays:
    """The blocks at the edge of a window are partial for some rows and full for others."""
    mask = Causal() & SlidingWindow(13, 0, sinks=1) & KeyPadding(x["length"])
    return dict(mask=mask, bias=x["bias"])


def segments(x: Arrays, _: Arrays) -> Arrays:
    """Ids, other ones in each row, say which blocks are empty."""
    return dict(mask=Causal() & Segments(x["q_ids"], x["k_ids"]))


def learned(x: Arrays, shared: Arrays) -> Arrays:
    """A scale, a soft cap and sinks that are arrays."""
    metadata = dict(
        softmax_scale=shared["scale"], logits_soft_cap=shared["cap"], softmax_aux=shared["sinks"]
    )
    return dict(mask=KeyPadding(x["length"]), bias=x["bias"], metadata=metadata)


def positions(x: Arrays, shared: Arrays) -> Arrays:
    """Scores that are functions of positions, which XLA may compute ahead of a loop."""
    score = (
        ALiBi(shared["slopes"]),
        T5Bias(shared["table"]),
        ScoreFn(lambda s, b, h, q, k: s * (1 + 0.3 * jnp.cos(0.7 * (q - k).astype(s.dtype)))),
    )
    return dict(mask=Causal() & KeyPadding(x["length"]), score=score)


def prefix(x: Arrays, shared: Arrays) -> Arrays:
    mask = (PrefixLM(x["start"]) | ChunkedCausal(6)) & KeyPadding(x["length"])
    return dict(mask=mask, score=ALiBi(shared["slopes"]), metadata=dict(softmax_scale=0.3))


def plain(x: Arrays, _: Arrays) -> Arrays:
    """Whatever is there is seen, so that `capacity` changes it: the length says what is there."""
    return dict(mask=KeyPadding(x["length"]))


def dropped(x: Arrays, _: Arrays) -> Arrays:
    key = jax.random.key(3)
    return dict(mask=Causal() & KeyPadding(x["length"]), key=key, metadata=dict(dropout_prob=0.7))


CASES = {
    "window": Case(window),
    "single block": Case(window, t=8, s=8, rows=1),
    "some blocks": Case(window, t=22, s=40),
    "segments": Case(segments, t=18, s=32, h=3, k=3, d=5, v=3, block=(3, 8)),
    "learned": Case(learned, t=10, s=16, h=6, k=1, d=12, v=7, block=(1, 16)),
    "learned, long": Case(learned, t=20, s=72, h=2, k=2, d=8, v=8, block=(16, 24), rows=1),
    "positions": Case(positions, t=20, s=16, h=4, k=4, block=(16, 16)),
    "positions, alone": Case(positions, t=6, s=8, h=2, k=1, d=7, v=9, rows=1),
    "prefix": Case(prefix, t=24, s=30, h=5, k=1, d=8, v=8, block=(8, 6)),
    "plain": Case(plain, t=4, s=16, h=1, k=1, d=2, v=1, block=(2, 4)),
    "wide": Case(plain, t=40, s=256, h=8, k=2, d=64, v=64, block=(16, 128), rows=2, more=128),
    "dropout": Case(dropped, t=12, s=24, rows=1, placed=True),
    "int8": Case(window, t=14, s=24, stored="int8"),
    "latents": Case(window, t=12, s=24, h=4, k=1, d=20, v=16, stored="latent"),
}
PLAIN = [name for name, case in CASES.items() if not case.stored]
"""The cases of keys and values that are arrays, which every strategy reads."""


def draw(rng: np.random.Generator, case: Case, rows: int, t: int, s: int, dtype: Any) -> Arrays:
    """Rows of random numbers, of other sizes in each row, and of random lengths and ids."""

    def new(*shape):
        size = 10.0 ** rng.uniform(-2, 2, (rows, *[1] * len(shape)))
        return (rng.normal(size=(rows, *shape)) * size).astype(dtype)

    ids = lambda n: np.sort(rng.integers(-1, 5, (rows, n)), 1).astype(np.int32)
    offset = rng.integers(0, max(case.s - case.t, 0) + 3, rows).astype(np.int32)
    ends = rng.integers(1, case.s + 1, rows), np.minimum(offset + case.t, case.s)
    return dict(
        q=new(t, case.h, case.d),
        ct=new(t, case.h, case.v),
        ct_lse=rng.normal(size=(rows, t, case.h)).astype(np.float32),
        bias=new(case.h, t, s),
        k=new(s, case.k, case.d),
        v=new(s, case.k, case.v),
        q_ids=ids(t),
        k_ids=ids(s),
        offset=offset,
        length=np.where(rng.random(rows) < 0.5, *ends).astype(np.int32),
        start=rng.integers(0, case.s, rows).astype(np.int32),
    )


def shared_by_rows(rng: np.random.Generator, case: Case) -> Arrays:
    """What all rows read."""
    wide = lambda *shape: rng.normal(size=shape).astype(np.float32)
    return dict(
        scale=np.float32(rng.uniform(0.1, 1)),
        cap=np.float32(rng.uniform(2, 20)),
        sinks=wide(case.h),
        slopes=np.abs(wide(case.h)),
        table=wide(8, case.h),
    )


def part(x: Arrays, rows: Any = slice(None), queries: Any = None, keys: Any = None) -> Arrays:
    """Some rows, and some of their queries or keys, of rows or results."""
    found = {}
    for name, array in x.items():
        at: list = [rows] + [slice(None)] * (array.ndim - 1)
        for axis, chosen in zip(AXES.get(name, (None, None)), (queries, keys)):
            if axis is not None and chosen is not None:
                at[axis] = chosen
        found[name] = array[tuple(at)]
    return found


def joined(xs: list[Arrays], which: int | None = None) -> Arrays:
    """Rows or results one after the other, or with the queries or keys of one behind the other's."""
    found = {}
    for name, array in xs[0].items():
        axis = 0 if which is None else AXES.get(name, (None, None))[which]
        found[name] = array if axis is None else np.concatenate([x[name] for x in xs], axis)
    return found


METADATA = AttentionMetadata()
STRICT = {cls.__name__: cls(METADATA, bitwise=True) for cls in (Blockwise, Ragged)}
STRICT |= {
    f"{name} in kernels": dataclasses.replace(x, metadata=METADATA.replace(platform="interpret"))
    for name, x in STRICT.items()
}


def _program(case: Case, name: str, gradients: bool, x: Arrays, shared: Arrays, table: Any):
    """What a call returns of rows. Keys and values lie in pages if there is a `table` of them."""
    features = dict(case.features(x, shared))
    sizes = dict(zip(("blocksize_q", "blocksize_k"), case.block))
    metadata = STRICT[name].metadata.replace(**sizes, **features.pop("metadata", {}))
    strategy = dataclasses.replace(STRICT[name], metadata=metadata)

    def call(given):
        y = x | given
        more = features | ({"bias": y["bias"]} if "bias" in features else {})
        key, value = y["k"], y["v"]
        if case.stored == "int8":
            # What is quantized has no gradient.
            fixed = jax.lax.stop_gradient((key, value))
            key, value = (Quantized.quantize(z, jnp.int8) for z in fixed)
        if case.stored == "latent":
            key = LatentKV(key[..., : case.v], key[..., case.v :])
        if table is not None:
            key, value = (_in_pages(z, table, case.block[1]) for z in (key, value))
        value = key.c_kv if case.stored == "latent" else value
        out = attention(
            y["q"], key, value, strategy, q_offset=y["offset"], return_logsumexp=True, **more
        )
        return out.attention_outputs, out.logsumexp

    given = {n: x[n] for n in ("q", "k", "v", "bias")}
    if not gradients:
        return dict(zip(("out", "lse"), call(given)))
    outs, pull = jax.vjp(call, given)
    return dict(zip(("out", "lse"), outs)) | pull((x["ct"], x["ct_lse"]))[0]


def _in_pages(x: Any, table: Any, size: int) -> Pages:
    """Keys or values in pages of a pool, which the `table` `[rows, pages of a row]` names."""
    owners = table.reshape(-1)

    def pool(array):
        cut = array.reshape(-1, size, *array.shape[2:])
        return jnp.ones((len(owners) + 3, *cut.shape[1:]), cut.dtype).at[owners].set(cut)

    return Pages(as_stored(x).map_tokens(pool), table)


@ft.cache
def program(optimised: bool) -> Callable:
    """It is compiled as users do, or for speed as the other tests are: see conftest.py."""
    options = {"xla_backend_optimization_level": 3} if optimised else None
    return jax.jit(_program, static_argnums=(0, 1, 2), compiler_options=options)


def check(case: Case, name: str, gradients: bool, dtype: Any, seed: int, kinds=ALL) -> None:
    """Some random rows in arrangements of these `kinds`. `"together"` is all but the last two of
    `KINDS` at once. A gradient of keys or values is a sum over queries: it is compared where these
    are the same.

    **Raises:** `AssertionError` where a row has other bits.
    """
    rng, t, s, n = np.random.default_rng(seed), case.t, case.s, case.rows
    new = lambda rows=n, t=t, s=s: draw(rng, case, rows, t, s, dtype)
    rows, shared = new(), shared_by_rows(rng, case)

    def call(x: Arrays, table: Any = None) -> Arrays:
        found = program(gradients)(case, name, gradients, x, shared, table)
        return {result: np.asarray(array) for result, array in found.items()}

    def same(kind: str, found: Arrays, want: Arrays, results: Any = None) -> None:
        for i in results or want:
            assert found[i].shape == want[i].shape, (kind, i)
            assert found[i].tobytes() == want[i].tobytes(), (kind, i, seed)

    want = joined([call(part(rows, slice(i, i + 1))) for i in range(n)])
    of_rows = [i for i in OF_ROWS if i in want]
    for kind in kinds:
        x, size = rows, n
        has = {kind} if kind != "together" else set(KINDS)
        if "padding" in has:  # queries whose results nobody asks for
            more = new(t=6)
            more |= dict(ct=np.zeros_like(more["ct"]), ct_lse=np.zeros_like(more["ct_lse"]))
            x = joined([x, more], QUERIES)
        if "capacity" in has:  # a larger cache, which holds anything
            more = draw(rng, case, n, x["q"].shape[1], case.more, dtype)
            x = joined([x, more | dict(k_ids=np.full((n, case.more), -1, np.int32))], KEYS)
        if "batch" in has:  # beside others, at any place
            size = n + 2
            places = np.arange(size) if case.placed else rng.permutation(size)
            others = draw(rng, case, 2, x["q"].shape[1], x["k"].shape[1], dtype)
            x = part(joined([x, others]), np.argsort(places))
        table, page = None, case.block[1]
        if "layout" in has and "Ragged" in name:
            table = rng.permutation(size * x["k"].shape[1] // page + 3)[:-3]
            table = table.reshape(size, -1).astype(np.int32)
        if not has.isdisjoint(KINDS[:4]):
            found = part(call(x, table), queries=slice(t), keys=slice(s))
            found = part(found, places[:n]) if "batch" in has else found
            same(kind, found, want)
        if kind == "chunks":  # which do not end where blocks end
            halves = slice(t // 2), slice(t // 2, t)
            found = [call(_part_of_queries(rows, at)) for at in halves]
            same(kind, joined(found, QUERIES), want, of_rows)
        if kind == "decode":
            i = int(rng.integers(t))
            one = slice(i, i + 1)
            same(kind, call(_part_of_queries(rows, one)), part(want, queries=one), of_rows)


def _part_of_queries(rows: Arrays, at: slice) -> Arrays:
    found = part(rows, queries=at)
    return found | dict(offset=found["offset"] + np.int32(at.start or 0))
