"""Measures a decoding step of a batch of rows, and appending to their cache.

There are 8 rows, with 16 query heads and 4 key heads of size 128, in float32. The keys lie in
memory as a cache holds them.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eqattn import attention, AttentionMetadata, cascade_attention, Causal, KeyPadding, Ragged
from eqattn.cache import KVCache, LatentKVCache, PagedKVCache, QuantizedKVCache, StackedPagedKVCache
from eqattn.nn import LatentAttention

from .cases import Case, Row
from .timing import rounds_of


ROWS, HEADS, KV_HEADS, DIM = 8, 16, 4, 128
# The lengths of rows of which 512 tokens fit. Their mean is 32, a 16th.
_SHORT = np.array([1, 4, 8, 16, 32, 32, 64, 99])


def lengths_of(case: Case) -> np.ndarray:
    """How many keys each row has: all of them, or, in the mean, a 16th."""
    if case.mask == "full":
        return np.full(ROWS, case.tokens, np.int32)
    return np.maximum(_SHORT * case.tokens // 512, 1).astype(np.int32)


def draw(tokens: int) -> list[jax.Array]:
    """The query, the keys and the values of a step."""
    rng = np.random.default_rng(0)
    shapes = ((1, HEADS), (tokens, KV_HEADS), (tokens, KV_HEADS))
    draw = lambda shape: rng.standard_normal((ROWS, *shape, DIM), dtype=np.float32)
    return [jnp.asarray(draw(shape)) for shape in shapes]


def _eqattn(query, key_, value, lengths):
    strategy = Ragged(AttentionMetadata())
    return attention(query, key_, value, strategy, mask=KeyPadding(lengths)).attention_outputs


def _jax_nn(query, key_, value, lengths):
    return jax.nn.dot_product_attention(query, key_, value, key_value_seq_lengths=lengths)


def _sum(query, key_, value, lengths):
    """Reads all keys and values once."""
    return key_.sum() + value.sum()


def compiled(function: Callable, *args: Any) -> tuple[Callable[[], Any], int]:
    """Compiles a function. Returns a call of it, and the bytes of its temporary memory."""
    run = jax.jit(function).lower(*args).compile()
    memory = run.memory_analysis()
    assert memory is not None  # a CPU's compiler knows
    return lambda: jax.block_until_ready(run(*args)), memory.temp_size_in_bytes


def step(case: Case, rounds: int) -> Iterator[Row]:
    """Measures a step against `jax.nn`, and against a sum that only reads the keys and values."""
    args = (*draw(case.tokens), jnp.asarray(lengths_of(case)))
    made = {"eqattn": compiled(_eqattn, *args), "jax.nn": compiled(_jax_nn, *args)}
    out, theirs = (np.asarray(call()) for call, _ in made.values())
    error = float(abs(out - theirs).max() / abs(out).max())
    note = "" if error < 1e-3 else f"jax.nn is WRONG by {error:.2g}"
    calls = {name: call for name, (call, _) in made.items()}
    if case.mask == "full":
        calls["sum"], _ = compiled(_sum, *args)
    times = rounds_of(calls, rounds, wall=case.cores > 1)
    faster = {n: times["jax.nn"] / times[n] for n in made}
    yield _row(case, "times faster", faster, note=note)
    if "sum" in times:
        yield _row(case, "share of a sum", {"eqattn": times["sum"] / times["eqattn"]})
    yield case.row("time ms", {n: float(np.median(times[n])) * 1e3 for n in made})
    yield case.row("temp MiB", {n: memory / 2**20 for n, (_, memory) in made.items()})


def _row(case: Case, figure: str, samples: dict[str, np.ndarray], note: str = "") -> Row:
    found = {n: [float(y) for y in np.percentile(x, (25, 50, 75))] for n, x in samples.items()}
    quartiles = {n: [low, high] for n, (low, _, high) in found.items()}
    return case.row(figure, {n: x[1] for n, x in found.items()}, quartiles=quartiles, note=note)


def longer(case: Case, rounds: int) -> Iterator[Row]:
    """Measures a step over the same lengths in a cache, and in one 16 times as long."""
    made = {}
    for name, tokens in (("short", case.tokens), ("eqattn", 16 * case.tokens)):
        lengths = jnp.full(ROWS, case.tokens // 2, jnp.int32)
        made[name] = compiled(_eqattn, *draw(tokens), lengths)
        made[name][0]()
    times = rounds_of({n: call for n, (call, _) in made.items()}, rounds, wall=case.cores > 1)
    yield _row(case, "time at 16 S / at S", {"eqattn": times["eqattn"] / times["short"]})
    grown = made["eqattn"][1] / made["short"][1]
    yield case.row("temp at 16 S / at S", {"eqattn": grown})


def append(case: Case, rounds: int) -> Iterator[Row]:
    """Measures writing one token per row into a donated cache, and into one 32 times as long. It
    also measures this into a cache that stays, outside of `jax.jit` and inside.
    """
    calls: dict[str, Callable[[], Any]] = {}
    for name, tokens in (("short", case.tokens), ("eqattn", 32 * case.tokens)):
        calls[name] = _appending(tokens)
        calls[name]()
    times = rounds_of(calls, rounds, wall=case.cores > 1)
    yield _row(case, "time at 32 S / at S", {"eqattn": times["eqattn"] / times["short"]})
    new, cache = _new(), KVCache.empty(ROWS, case.tokens, KV_HEADS, DIM)
    inside = jax.jit(lambda cache, new: cache.append(new, new))
    calls = {
        "eqattn": lambda: jax.block_until_ready(cache.append(new, new)),
        "inside": lambda: jax.block_until_ready(inside(cache, new)),
    }
    for call in calls.values():
        call()
    times = rounds_of(calls, rounds, wall=case.cores > 1)
    yield _row(case, "outside of jit / inside", {"eqattn": times["eqattn"] / times["inside"]})


def _new() -> jax.Array:
    """A new token of each row."""
    return jnp.ones((ROWS, 1, KV_HEADS, DIM), jnp.float32)


def _appending(tokens: int) -> Callable[[], None]:
    """Returns a call that appends a token to a cache of the given size, and drops it again."""

    def one(cache: KVCache, new: jax.Array) -> KVCache:
        return cache.append(new, new).truncate(cache.length)

    new, cache = _new(), KVCache.empty(ROWS, tokens, KV_HEADS, DIM)
    run = jax.jit(one, donate_argnums=0).lower(cache, new).compile()

    def call():
        nonlocal cache
        cache = jax.block_until_ready(run(cache, new))

    return call


def cached(case: Case, rounds: int) -> Iterator[Row]:
    """Measures a step that appends a token per row to a donated cache and attends. The cache has
    room for `S` tokens, and then for `8 S`.
    """
    made = {"short": _stepping(case, case.tokens), "eqattn": _stepping(case, 8 * case.tokens)}
    for call, _ in made.values():
        call()
    times = rounds_of({n: call for n, (call, _) in made.items()}, rounds, wall=case.cores > 1)
    yield _row(case, "time at 8 S / at S", {"eqattn": times["eqattn"] / times["short"]})
    yield case.row("temp MiB", {"eqattn": made["eqattn"][1] / 2**20})


def _stepping(case: Case, tokens: int) -> tuple[Callable[[], None], int]:
    """Returns a call, and the bytes of its temporary memory. The call is a step over 9 tokens of
    each row, the last of which it appends and then drops.
    """
    dtype = jnp.dtype(case.dtype)
    strategy = Ragged(AttentionMetadata(runtime_dtype=dtype))
    sizes: Any = dict(kv_heads=case.kv_heads, head_dim=DIM, dtype=dtype)
    if case.cache == "int8":
        cache = QuantizedKVCache.empty(ROWS, tokens, **sizes)
    else:
        cache = KVCache.empty(ROWS, tokens, **sizes)
    query, *new = (jnp.ones((ROWS, 1, n, DIM), dtype) for n in (HEADS, *[case.kv_heads] * 2))
    cache = cache.append(*[jnp.repeat(x, 8, 1) for x in new])

    def one(cache, query, key_, value):
        offset = cache.length
        cache = cache.append(key_, value)
        mask = Causal() & cache.mask()
        out = attention(query, cache.key, cache.value, strategy, mask=mask, q_offset=offset)
        return cache.truncate(offset), out.attention_outputs

    run = jax.jit(one, donate_argnums=0).lower(cache, query, *new).compile()
    memory = run.memory_analysis()
    assert memory is not None  # a CPU's compiler knows

    def call():
        nonlocal cache
        cache, _ = jax.block_until_ready(run(cache, query, *new))

    return call, memory.temp_size_in_bytes


def shared(case: Case, rounds: int) -> Iterator[Row]:
    """Measures a step of rows that share the pages of their first `S` tokens, and have 32 more
    tokens each. It is done by a cascade, and row by row.
    """
    size, own = 64, 32
    pages = case.tokens // size + ROWS
    cache = PagedKVCache.empty(ROWS, case.tokens + own, pages, size, KV_HEADS, DIM)
    rng = np.random.default_rng(0)

    def draw(tokens, heads):
        return jnp.asarray(rng.standard_normal((ROWS, tokens, heads, DIM), dtype=np.float32))

    counts = jnp.array([case.tokens] + [0] * (ROWS - 1))
    cache = cache.reserve(counts)
    cache = cache.append(draw(case.tokens, KV_HEADS), draw(case.tokens, KV_HEADS), counts)
    cache = cache.share(list(range(1, ROWS)), 0, case.tokens).reserve(own)
    cache = cache.append(draw(own, KV_HEADS), draw(own, KV_HEADS))

    def by_rows(query, cache):
        mask, at = Causal() & cache.mask(), cache.length - 1
        out = attention(query, cache.key, cache.value, Ragged(), mask=mask, q_offset=at)
        return out.attention_outputs

    def cascade(query, cache):
        return cascade_attention(query, cache, q_offset=cache.length - 1).attention_outputs

    args = draw(1, HEADS), cache
    made = {"eqattn": compiled(cascade, *args), "by rows": compiled(by_rows, *args)}
    out, other = (np.asarray(call()) for call, _ in made.values())
    assert abs(out - other).max() < 1e-4 * abs(other).max()
    calls = {name: call for name, (call, _) in made.items()}
    times = rounds_of(calls, rounds, wall=case.cores > 1)
    faster = {"eqattn": times["by rows"] / times["eqattn"]}
    yield _row(case, "times faster", faster, note="than shared pages row by row")
    yield case.row("time ms", {n: float(np.median(times[n])) * 1e3 for n in made})
    yield case.row("temp MiB", {n: memory / 2**20 for n, (_, memory) in made.items()})


def latent(case: Case, rounds: int) -> Iterator[Row]:
    """Measures a step of one row of DeepSeek's layer from a cache of latents, with 16 heads in the
    sizes of DeepSeek V3. It is absorbed, or makes the keys and values of all heads again.
    """
    made = {n: _latent_step(case, n) for n in ("absorbed", "expanded")}
    outs = {n: np.asarray(call()) for n, (call, _) in made.items()}
    assert abs(outs["absorbed"] - outs["expanded"]).max() < 1e-4 * abs(outs["absorbed"]).max()
    times = rounds_of({n: call for n, (call, _) in made.items()}, rounds, wall=case.cores > 1)
    faster = {"eqattn": times["expanded"] / times["absorbed"]}
    yield _row(case, "times faster", faster, note="than keys and values of all heads")
    yield case.row("time ms", {"eqattn": float(np.median(times["absorbed"])) * 1e3})
    yield case.row("temp MiB", {"eqattn": made["absorbed"][1] / 2**20})


def _latent_step(case: Case, form: Any) -> tuple[Callable[[], jax.Array], int]:
    """Returns a call, and the bytes of its temporary memory. The call is a step over a full cache,
    the last token of which it appends and then drops.
    """
    sizes: Any = dict(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    layer = LatentAttention(16, 512, **sizes, key=jax.random.key(0))
    draw = lambda i, *shape: jax.random.normal(jax.random.key(i), (1, *shape))
    before = case.tokens - 1
    cache = LatentKVCache.empty(1, case.tokens, 512, 64)
    cache = cache.append(draw(1, before, 1, 64), draw(2, before, 1, 512))

    def one(cache, layer, x):
        length = cache.length
        cache, out = layer(x, "causal", cache=cache, form=form)
        return cache.truncate(length), out

    args = layer, draw(3, 1, 512)
    run = jax.jit(one, donate_argnums=0).lower(cache, *args).compile()
    memory = run.memory_analysis()
    assert memory is not None  # a CPU's compiler knows

    def call():
        nonlocal cache
        cache, out = jax.block_until_ready(run(cache, *args))
        return out

    return call, memory.temp_size_in_bytes


def reserve(case: Case, rounds: int) -> Iterator[Row]:
    """Measures how long the host takes to find pages for one more token of 32 rows in 32 layers.
    All layers share one table, or each has a cache.
    """
    sizes: Any = dict(batch=32, capacity=1024, pages=2048, page_size=16, kv_heads=1, head_dim=1)
    stack = StackedPagedKVCache.empty(layers=32, **sizes).reserve(1)
    caches = [PagedKVCache.empty(**sizes).reserve(1) for _ in range(32)]
    calls = {
        "eqattn": lambda: jax.block_until_ready(stack.reserve(17).table),
        "a cache a layer": lambda: jax.block_until_ready([c.reserve(17).table for c in caches]),
    }
    times = rounds_of(calls, rounds)
    faster = {"eqattn": times["a cache a layer"] / times["eqattn"]}
    yield _row(case, "times faster", faster, note="than a table for each of 32 layers")
    yield case.row("time ms", {n: float(np.median(x)) * 1e3 for n, x in times.items()})


EXPERIMENTS = {
    "append": append,
    "cached": cached,
    "decode": step,
    "latent": latent,
    "longer": longer,
    "reserve": reserve,
    "shared": shared,
}
