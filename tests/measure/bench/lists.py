"""Measures keys that are listed, trees, the ranking of keys, and the blocks of neighbourhoods."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eqattn import attention, AttentionMetadata, Blockwise, Selected, top_keys, Tree
from eqattn.masks._base import block_table

from .cases import Case, DIM, HEADS, Row
from .timing import ratios, rounds_of


def _program(function: Callable, backward: bool, *args: Any) -> tuple[Callable[[], Any], int]:
    """A call of a function or of its gradients for its first three arguments, and the bytes of its
    temporary memory.
    """
    if backward:
        function = jax.grad(lambda *xs, f=function: f(*xs).sum(), (0, 1, 2))
    run = jax.jit(function).lower(*args).compile()
    memory = run.memory_analysis()
    assert memory is not None  # a CPU's compiler knows
    return lambda: jax.block_until_ready(run(*args)), memory.temp_size_in_bytes


def _compare(
    case: Case, rounds: int, run: Callable, inputs: tuple, calls: dict[str, tuple]
) -> Iterator[Row]:
    """Compares calls of a function, which gets its inputs and the further arguments of each call.

    **Arguments:**

    - `calls`: the further arguments of each call, by name. `"eqattn"` has listed keys, and
        `"all keys"` has no list. A third call shows what bounds the first, and its figure has its
        name.
    """
    made = {key: _program(run, case.backward, *inputs, *more) for key, more in calls.items()}
    for call, _ in made.values():
        call()
    few = max(rounds // 4, 1)  # what all keys take is seconds
    times = rounds_of({key: call for key, (call, _) in made.items()}, few)
    medians, quartiles = ratios(times, "all keys")
    name = list(calls)[-1]
    third = medians.pop(name), quartiles.pop(name)
    yield case.row("time / all keys", medians, quartiles=quartiles)
    yield case.row(name, {"eqattn": third[0]}, quartiles={"eqattn": third[1]})
    yield case.row("time ms", {key: float(np.median(times[key])) * 1e3 for key in medians})
    yield case.row("temp MiB", {key: made[key][1] / 2**20 for key in medians})


def selected(case: Case, rounds: int) -> Iterator[Row]:
    """Measures 32 queries with 128 heads over one key head, as in DeepSeek-V3.2. Each query lists a
    64th of the keys. In the further figure all list the first ones, which stay in the caches of a
    core.
    """
    rng, t, heads = np.random.default_rng(0), 32, 128
    draw = lambda n, h: jnp.asarray(rng.standard_normal((1, n, h, DIM), dtype=np.float32))
    inputs = draw(t, heads), draw(case.tokens, 1), draw(case.tokens, 1)
    n = case.tokens // 64
    lists = np.array([rng.permutation(case.tokens)[:n] for _ in range(t)])
    first = np.broadcast_to(np.arange(n), lists.shape)

    def run(query, key_, value, indices):
        mask = None if indices is None else Selected(indices)
        return attention(query, key_, value, mask=mask).attention_outputs

    of = lambda rows: (jnp.asarray(rows[None, None], jnp.int32),)
    calls = {"eqattn": of(lists), "all keys": (None,), "of the first keys": of(first)}
    yield from _compare(case, rounds, run, inputs, calls)


def selected_blocks(case: Case, rounds: int) -> Iterator[Row]:
    """Measures eight heads, which may share keys. Blocks of 64 queries list a tenth of the blocks
    of 64 keys. The third call visits all blocks of 64 by 64. Its figure is a tenth of its time,
    which listed blocks take if they are visited as fast.
    """
    rng, size = np.random.default_rng(0), 64
    draw = lambda h: jnp.asarray(rng.standard_normal((1, case.tokens, h, DIM), dtype=np.float32))
    inputs = draw(HEADS), draw(case.kv_heads), draw(case.kv_heads)
    blocks = case.tokens // size
    n = max(blocks // 10, 1)
    every = range(case.kv_heads * blocks)
    lists = np.array([rng.permutation(blocks)[:n] for _ in every], np.int32)
    indices = jnp.asarray(lists.reshape(1, case.kv_heads, blocks, n))

    def run(query, key_, value, indices, small):
        mask = None if indices is None else Selected(indices, size, size)
        metadata = AttentionMetadata(blocksize_q=size, blocksize_k=size)
        strategy = Blockwise() if small is None else Blockwise(metadata)
        return attention(query, key_, value, strategy, mask=mask).attention_outputs

    share, name = n / blocks, "of blocks as small"
    # A tree without arrays is static: `()` is true of being small, and None is not.
    calls = {"eqattn": (indices, None), "all keys": (None, None), name: (None, ())}
    for row in _compare(case, rounds, run, inputs, calls):
        row.note = f"{share:.3f} of the pairs" if row.figure == "time / all keys" else ""
        if row.figure == name:
            row.values = {key: x * share for key, x in row.values.items()}
            row.quartiles = {key: [y * share for y in x] for key, x in row.quartiles.items()}
        yield row


def selected_by_query(case: Case, rounds: int) -> Iterator[Row]:
    """Measures eight heads with their own keys, of which each query lists two of eight blocks, as
    in MoBA. Lists of neighbouring queries differ. In the third call, 256 queries list the same.
    """
    rng, size = np.random.default_rng(0), case.tokens // 8
    draw = lambda: jnp.asarray(rng.standard_normal((1, case.tokens, HEADS, DIM), dtype=np.float32))
    inputs = draw(), draw(), draw()
    lists = np.array([rng.permutation(8)[:2] for _ in range(HEADS * case.tokens)], np.int32)
    apart = lists.reshape(1, HEADS, case.tokens, 2)
    alike = apart[:, :, ::256].repeat(256, 2)[:, :, : case.tokens]

    def run(query, key_, value, indices):
        mask = None if indices is None else Selected(indices, block_k=size)
        return attention(query, key_, value, mask=mask).attention_outputs

    of = lambda rows: (jnp.asarray(rows),)
    calls = {"eqattn": of(apart), "all keys": (None,), "of lists alike": of(alike)}
    yield from _compare(case, rounds, run, inputs, calls)


def ranking(case: Case, rounds: int) -> Iterator[Row]:
    """Lists the 2048 greatest logits of 32 queries with one head, and sorts all of them at once."""
    rng, t = np.random.default_rng(0), 32
    draw = lambda n: jnp.asarray(rng.standard_normal((1, n, 1, DIM), dtype=np.float32))
    args, n = (draw(t), draw(case.tokens)), min(2048, case.tokens)
    logits = lambda q, k: jnp.einsum("bthd,bshd->bhts", q, k)
    made = {
        "eqattn": _program(lambda q, k: top_keys(q, k, n).indices, False, *args),
        "jax.lax.top_k": _program(lambda q, k: jax.lax.top_k(logits(q, k), n)[1], False, *args),
    }
    for call, _ in made.values():
        call()
    times = rounds_of({name: call for name, (call, _) in made.items()}, rounds)
    medians, quartiles = ratios(times, "jax.lax.top_k")
    yield case.row("time / jax.lax.top_k", medians, quartiles=quartiles)
    yield case.row("time ms", {name: float(np.median(x)) * 1e3 for name, x in times.items()})
    yield case.row("temp MiB", {name: memory / 2**20 for name, (_, memory) in made.items()})


def tree(case: Case, rounds: int) -> Iterator[Row]:
    """Builds a forest of prompts of 256 tokens with 8 completions of 128 each, and its table."""
    one = np.concatenate(
        [np.arange(-1, 255), *[np.r_[255, 256 + 128 * i : 383 + 128 * i] for i in range(8)]]
    )
    trees = -(-case.tokens // len(one))
    parents = np.concatenate([np.where(one < 0, -1, one + i * len(one)) for i in range(trees)])
    parents = np.where(parents < case.tokens, parents, -1)[: case.tokens].astype(np.int32)
    mask, block = Tree(parents), min(128, case.tokens)

    def table():
        return block_table(mask, case.tokens, case.tokens, block, block)

    calls = {"build": lambda: Tree(parents), "table": table}
    times = rounds_of(calls, rounds)
    for name in calls:
        yield case.row(f"{name} ms", {"eqattn": float(np.median(times[name])) * 1e3})
    yield case.row("blocks skipped", {"eqattn": float((np.asarray(table()) == 0).mean())})


EXPERIMENTS = {
    "ranking": ranking,
    "selected": selected,
    "selected blocks": selected_blocks,
    "selected by query": selected_by_query,
    "tree": tree,
}
