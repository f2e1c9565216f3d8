"""How strategies fold a problem: on one device, over sharded sequences, or all at once.

Strategies import this module when they first run. Its imports take nearly a fifth of the time of
`import eqattn`. `python tests/measure bench --only import` measures the whole import;
`python -X importtime -c "import eqattn.strategies._fold"` shows this share.
"""

import dataclasses
import functools as ft
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._carry import Carry, safe_max
from .._jax import compiled, is_narrow
from .._misc import even_block
from .._problem.block_classes import choose_live_tiling, sees_few_keys
from .._problem.fold import attend_problem, fold_problem, top_of_problem
from .._problem.lists import fold_selected, key_slots, live_blocks, live_pairs, row_lists, tiling_of
from .._problem.mesh import lists_own_keys
from .._problem.operands import BlockOperands
from .._problem.problem import cached, Problem
from .._problem.shards import accumulate_in_fp32, fold_own_rows, HeadExchange
from .._problem.tiling import BlockOperand, choose_tiling, layers_in_pages, Tiling
from .._ring.plan import reach
from .._sweep.grid import BATCH, HEAD, PARTIAL
from .._sweep.lowering import Lowering, XLA
from .._sweep.products import dot
from .._sweep.ring import Gathering, Rotation
from .._sweep.steps import softmax_terms
from .._sweep.sweep import block_dtype
from ..masks._base import AbstractMask, split_list


@cached
def fold_on_device(
    problem: Problem,
    *,
    block_q,
    block_k,
    fused,
    lowering=XLA,
    manual=None,
    in_place=False,
    fixed=False,
) -> Carry:
    """Folds a problem on one device, block by block. [`eqattn.strategies.fold`][] has the arguments
    under longer names.
    """
    selection, listed, always = split_list(problem.mask)
    if selection is not None or not lowering.reads_layers:
        problem = layers_in_pages(problem)
    if selection is not None:
        if manual is not None and lists_own_keys(problem):
            rest = dict(block_q=block_q, block_k=block_k, fused=fused, lowering=lowering)
            rest |= dict(in_place=in_place, fixed=fixed)
            return fold_own_rows(problem, manual, ft.partial(fold_on_device, **rest))
        if always is not False:
            rest = dataclasses.replace(problem, mask=None if always is True else always)
            # The gradients of narrow keys, of two parts, are to be summed before they are rounded.
            wide = not is_narrow(problem.query) and lowering is XLA and not fixed
            in_place = in_place or (wide and sees_few_keys(rest))
            problem = accumulate_in_fp32(problem, lowering, in_place)
        rest = dict(fused=fused, block_q=block_q, block_k=block_k, lowering=lowering)
        visit = _visit_of_list(problem, selection, manual=manual, **rest)
        # From here on, its indices are not needed, and positions may be moved.
        problem = problem.at_places(lists=False)
        _, listed, always = split_list(problem.mask)
        if always is False:
            mask = None if listed is True else listed
            return visit(dataclasses.replace(problem, mask=mask))
        more = ~always if listed is True else listed & ~always
        added = dataclasses.replace(problem, mask=more)
        alone = dataclasses.replace(problem, mask=always)
        rest = dict(rest, manual=manual, in_place=in_place)
        return fold_on_device(alone, **rest).merge(visit(added))
    devices = 1 if manual is None else manual.parts(HEAD)
    tiling = choose_live_tiling(
        problem,
        block_q,
        block_k,
        in_place=in_place,
        lowering=lowering,
        devices=devices,
        fixed=fixed,
    )
    return fold_problem(
        problem, tiling, HeadExchange(manual=manual), fused=fused, lowering=lowering
    )


@cached
def attend_on_device(
    problem: Problem, *, block_q, block_k, fused, lowering, manual, fixed, dtype
) -> tuple[Array, Array]:
    """The output, in a dtype, and the logsumexp of a problem on one device, with the sinks."""
    selection, listed, _ = split_list(problem.mask)
    more: dict[str, Any] = {}
    if selection is None:
        tiling = choose_live_tiling(problem, block_q, block_k, lowering=lowering, fixed=fixed)
    else:
        tiling = tiling_of(problem, selection, block_q, block_k, lowering)
        assert tiling is not None, "visits_once"
        shown, more = _on_list(problem, selection, tiling, lowering)
        problem = problem.at_places(lists=False)
        _, listed, _ = split_list(problem.mask)
        problem = shown(problem, None if listed is True else listed)
    spread = HeadExchange(manual=manual)
    more |= dict(fused=fused, lowering=lowering, dtype=dtype)
    return attend_problem(problem, tiling, spread, **more)


def visits_once(problem: Problem, *, block_q, block_k, lowering) -> bool:
    """Whether one visit of blocks finds all pairs of a problem. It does so without a list. With
    one, all pairs must be on it, and its blocks are visited where they lie.
    """
    selection, _, always = split_list(problem.mask)
    if selection is None:
        return True
    in_place = tiling_of(problem, selection, block_q, block_k, lowering) is not None
    return always is False and in_place


def _on_list(
    problem: Problem, selection: Any, tiling: Tiling, lowering: Lowering
) -> tuple[Callable[..., Problem], dict[str, Any]]:
    """A function that gives a problem a mask of what else hides pairs, and what `fold_problem` and
    `attend_problem` are told of a list of blocks.
    """
    live, several = live_blocks(problem, selection, tiling, lowering), None
    if lowering is not XLA:
        several = row_lists(problem, selection, lowering) if max(live.shape[-2:]) > 1 else None

    def shown(problem: Problem, mask: AbstractMask | None) -> Problem:
        terms = [x for x in (mask, several) if x is not None]
        return dataclasses.replace(problem, mask=ft.reduce(operator.and_, terms) if terms else None)

    return shown, dict(live=live, live_pairs=live_pairs(selection, tiling))


@cached
def top_on_device(
    problem: Problem, *, count, block_q, block_k, in_place, manual=None
) -> tuple[Array, Array]:
    """The `count` greatest logits of each row, and the positions of their keys, where each device
    has all tokens of its rows and heads.
    """
    block_k = _ranked_keys(count) if block_k is None and not in_place else block_k
    devices = 1 if manual is None else manual.parts(HEAD)
    tiling = choose_tiling(problem, block_q, block_k, in_place=in_place, devices=devices)
    return top_of_problem(problem, tiling, HeadExchange(manual=manual), count=count)


def _ranked_keys(count: int) -> int | None:
    """How many keys a block has whose logits join a list of `count`. It has several times as many,
    as each block ranks the list again. None leaves it to the lowering.
    """
    return None if count <= 32 else 4 << (count - 1).bit_length()


def _visit_of_list(
    problem: Problem, selection: Any, *, fused, block_q, block_k, lowering, manual
) -> Callable[[Problem], Carry]:
    """The fold of the pairs that a list names. What it returns takes the problem with what else
    hides pairs as its mask.
    """
    tiling = tiling_of(problem, selection, block_q, block_k, lowering)
    if tiling is not None:
        shown, more = _on_list(problem, selection, tiling, lowering)
        more |= dict(spread=HeadExchange(manual=manual), fused=fused, lowering=lowering)
        return lambda problem: fold_problem(shown(problem, problem.mask), tiling, **more)
    slots, seen = key_slots(problem, selection)
    if manual is not None:  # The gathered problem has other axes than those.
        lowering = XLA
    sizes = dict(fused=fused, block_q=block_q, block_k=block_k, lowering=lowering)
    fold = ft.partial(_fold_gathered, **sizes)
    given = dict(selection=selection, slots=slots, seen=seen)
    return ft.partial(fold_selected, **given, fold=fold, wide=not lowering.multiplies_narrow())


def _fold_gathered(problem: Problem, *, block_q, block_k, fused, lowering) -> Carry:
    """Folds a problem whose keys are gathered.

    With few queries for many keys it is like a decoding step, so ordinary JAX reads the keys as
    they lie. A block has more keys than there, such that its logits have 2^15 numbers. This was
    measured on one core of a busy CPU, with 64 heads and 2048 keys for each of 64 queries. Blocks
    of 256, 512 and 2048 keys took 94, 55 and 217 ms. Bringing the keys into another order first
    took 150 ms.

    For blocks of 64 queries, that order is the faster one. There, few keys are one block, without
    padding. A list of 384 keys took 0.20 of the time of all keys, and 0.30 in blocks of 256
    (`python tests/measure bench --only cpu-selected-blocks-fwd`). With four heads for each key
    head, one block was slower: 0.15 and not 0.11 in `cpu-selected-blocks-gqa-grad`.
    """
    t, s, heads, _ = problem.sizes
    in_place = lowering is XLA and t < 16
    if block_k is None and in_place:
        most = max(2**15 // (t * heads), 128)
        block_k = even_block(s, most) or min(most, s)
    elif block_k is None and lowering is XLA and t * heads * s <= 2**15:
        block_k = s
    tiling = choose_tiling(problem, block_q, block_k, in_place=in_place, lowering=lowering)
    return fold_problem(problem, tiling, fused=fused, lowering=lowering)


@compiled  # outside of `jax.jit`, JAX cannot look at known arrays inside of a `shard_map`
@cached
def fold_sharded(  # noqa: PLR0913 (the seeds' forward and its options)
    problem: Problem, *, block_q, block_k, place, manual, unroll, fused, lowering, fixed
) -> Carry:
    """Folds a problem whose tokens are sharded over devices as `place`, a `SequenceSharding`, says.

    Along `axis`, keys and values rotate from device to device, or each device gathers them. Along
    `head_axis`, devices exchange tokens for heads. Either may be None.
    """
    problem, tiling, spread = _over_devices(
        problem, block_q, block_k, place, manual, unroll, lowering, fixed
    )
    return fold_problem(problem, tiling, spread, fused=fused, lowering=lowering)


@compiled
@cached
def top_sharded(
    problem: Problem, *, count, block_q, block_k, place, manual, unroll
) -> tuple[Array, Array]:
    """The same as `top_on_device` of a problem whose tokens are sharded as for `fold_sharded`."""
    block_k = _ranked_keys(count) if block_k is None else block_k
    found = _over_devices(problem, block_q, block_k, place, manual, unroll, XLA)
    return top_of_problem(*found, count=count)


def _over_devices(
    problem: Problem, block_q, block_k, place, manual, unroll, lowering, fixed=False
) -> tuple[Problem, Tiling, HeadExchange]:
    """A problem with the positions of its tokens, its blocking, and the devices that it is spread
    over.
    """
    axis, n, head_axis, group, mesh, layout, gathers, _ = place
    # A block must lie on one device and in one chunk of the layout. So the tokens of a place of
    # the ring are cut into a number of pieces that both its chunks and its devices divide.
    pieces = math.lcm(layout.parts, group)
    t, s, _, _ = problem.sizes
    ring = None
    if gathers:
        ring = Gathering(axis, n)
    elif axis is not None:
        ahead, behind = reach(problem, layout, n, group)
        ring = Rotation(axis, n, ahead, behind, unroll)

    problem = problem.at_places(place.array_tokens(t), place.array_tokens(s))

    def tokens(length, given):
        """The positions of the tokens of this device's place of the ring, or of all places if the
        axes are automatic. Positions that the caller gave are gathered over `head_axis`, as the
        exchange of tokens for heads gathers the tokens.
        """
        if given is not None:
            gathered = mesh is None and head_axis is not None
            return lax.all_gather(given, head_axis, axis=1, tiled=True) if gathered else given
        return place.tokens(length)

    problem = dataclasses.replace(
        problem,
        q_positions=tokens(t, problem.q_positions),
        kv_positions=tokens(s, problem.kv_positions),
        kv_places=None if problem.kv_places is None else tokens(s, problem.kv_places),
    )
    parts = pieces // group if mesh is None else pieces * n
    shards = n * group if mesh is None else 1
    tiling = choose_tiling(problem, block_q, block_k, parts, shards, lowering=lowering, fixed=fixed)
    return problem, tiling, HeadExchange(ring, head_axis, group, manual)


@cached
def fold_dense(problem: Problem) -> tuple[Carry, Array]:
    """Folds a problem in a single block, and returns the Carry and the probabilities
    `[B, H, T, S]`. There is no loop and no rule of this library for derivatives.
    """
    problem = problem.at_places()
    t, s, heads, _ = problem.sizes
    tiling = choose_tiling(problem, max(t, 1), max(s, 1))
    if 0 in (*tiling.grid, t):
        shape = (tiling.batch, t, heads)
        empty = Carry.empty(shape, problem.value.shape[-1], problem.accumulation_dtype)
        return empty, jnp.zeros((tiling.batch, heads, t, s), problem.accumulation_dtype)
    whole = BlockOperands(problem, tiling)
    logits, weigh = whole.logits(PARTIAL), whole.weigh(PARTIAL)

    def block(blocks, values):
        s, *weight = logits(*blocks)
        v, *nan_flag = weigh(*values)
        top = s.max(0)
        kept, den = softmax_terms(s, safe_max(top), weight, nan_flag)
        num = dot(v, kept, (0, 0), **dict(whole.products)).T
        return num, den, jax.lax.stop_gradient(top), kept

    single = {a: n for a, n in zip((BATCH, HEAD), tiling.grid)}
    operands = [_whole(x) for x in whole.operands]
    values = [_whole(x) for x in whole.values]
    for axis in (HEAD, BATCH):
        mapped = [0 if axis in x.axes else None for x in whole.operands]
        block = jax.vmap(block, (mapped, 0), axis_size=single[axis])
    num, den, top, kept = block(operands, values)
    carry = Carry(*[tiling.from_rows(x[:, :, None]) for x in (num, den, top)])
    # The inner `where` keeps 1 / 0 out of the derivative for rows that see no key.
    inverse = jnp.where(den == 0, 0, 1 / jnp.where(den == 0, 1, den))
    weights = jnp.swapaxes(kept * inverse[:, :, None], -1, -2)
    return carry, weights.reshape(tiling.batch, heads, t, s)


def _whole(operand: BlockOperand) -> Array:
    """An operand without its axes for blocks of rows and columns, as there is one block."""
    x, axes = operand.array, operand.axes
    x = x.reshape([n for a, n in zip(axes, x.shape) if a < -2] + list(x.shape[len(axes) :]))
    return x.astype(block_dtype(x))
