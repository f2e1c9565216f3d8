"""Operands of keys and values that stay as they lie in memory."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax import lax

from .._sweep.grid import BATCH, COL, HEAD
from .._sweep.lowering import Lowering
from .blocking import Blocking, BlockOperand
from .problem import Problem
from .stack_layer import in_pages, StackLayer
from .storage import AbstractStored


class InPlace(NamedTuple):
    """Operands of keys and values that stay in place.

    **Arguments:**

    - `keys`, `values`: their arrays. Each page of a block is a separate operand.
    - `tables`: for each axis that is looked up, the pages of each block, or the layer.
    - `sizes`: how many pages or layers there are, for each of these axes.
    """

    keys: tuple[BlockOperand, ...]
    values: tuple[BlockOperand, ...]
    tables: tuple[BlockOperand, ...]
    sizes: tuple[int, ...]


def in_shares(x: AbstractStored, blocking: Blocking, lowering: Lowering) -> AbstractStored:
    """Keys or values in as many shares of heads as the blocking has.

    For a pool of pages, other shares would copy the scales of all pages, and gather them where
    devices share the heads. Loops of ordinary JAX read any number of shares, so the pool stays.
    """
    as_they_are = x.table is not None and blocking.kv_heads == 1 and lowering.drops_single_axes
    return x if as_they_are else x.in_shares(blocking.kv_heads)


def single_axes(x: AbstractStored, blocking: Blocking, lowering: Lowering) -> list[tuple[int, ...]]:
    """For each array of `x`, the axes of size 1 that its blocks lose."""
    if not lowering.drops_single_axes:
        return [()] * len(x.arrays)
    one_head = x.shape[2] == blocking.kv_heads
    shares = [a.shape[-2] == blocking.kv_heads for a in x.arrays]
    return [(0,) * n if flat else (1,) * one_head for flat, n in zip(x.flat, shares)]


def in_place(held: Sequence[AbstractStored], blocking: Blocking, lowering: Lowering) -> InPlace:
    """Cuts keys and values, `held` as they are stored, into operands where they lie."""
    placed, tables, sizes = [], [], ()
    shared = blocking.kv_heads > 1
    for role, x in zip(("key", "value"), held):
        single = single_axes(x, blocking, lowering)
        if x.table is None:
            axes, lead, cut = (BATCH, HEAD, COL) if shared else (BATCH, COL), 0, blocking.columns_of
            if isinstance(x, StackLayer):
                axes, lead, cut = (len(tables), *axes), 1, jax.vmap(blocking.columns_of)
                tables.append(BlockOperand("page", x.index, ()))
                sizes += (len(x.arrays[0]),)
            # The axis of a single head goes before the padding, which loops can then undo.
            early = [one == (1,) and not shared for one in single]
            arrays = [lax.squeeze(a, [lead + 2] * e) for a, e in zip(x.arrays, early)]
            found = [(cut(a, flat=f) if f else cut(a), axes) for a, f in zip(arrays, x.flat)]
            single = [() if e else one for one, e in zip(single, early)]
            if lead and len(x.arrays) and x.shape[0] == 1 and lowering.drops_single_axes:
                # Behind the axis of layers, XLA:CPU copied all of these for the axis of one row.
                kept = tuple(axis for axis in axes if axis != BATCH)
                found = [(lax.squeeze(a, [axes.index(BATCH)]), kept) for a, _ in found]
        else:
            pools = [blocking.pages_of(a, flat) for a, flat in zip(x.arrays, x.flat)]
            found = []
            for table in blocking.tables_of(x.table):
                axes = (HEAD, len(tables)) if shared else (len(tables),)
                found += [(a, axes) for a in pools]
                tables.append(BlockOperand("page", table, (BATCH, COL)))
                sizes += (len(x.arrays[0]),)
        lie = [
            BlockOperand(role, lax.squeeze(a, [len(axes) + i for i in one]), axes)
            for (a, axes), one in zip(found, single * len(found))
        ]
        placed.append(tuple(lie))
    keys, values = placed
    return InPlace(keys, values, tuple(tables), sizes)


def layers_in_pages(problem: Problem) -> Problem:
    """The problem with `in_pages` of its keys and values."""
    key, value = in_pages(problem.key), in_pages(problem.value)
    return dataclasses.replace(problem, key=key, value=value)
