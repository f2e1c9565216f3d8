"""The block functions of a call as kernels get them, evaluated outside of kernels."""

import dataclasses
import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eqattn import attention, AttentionMetadata, Blockwise
from eqattn._jax import evaluated, interpret, jaxpr_as_fun
from eqattn._sweep.attend import attend_p
from eqattn._sweep.grid import BlockGrid, ROW
from eqattn._sweep.steps import FoldStep
from eqattn._sweep.sweep import sweep_p
from eqattn.kernels._program import calls, LOG2E
from eqattn.kernels.nvidia._operands import COLUMNS, Operand, ROWS
from eqattn.kernels.nvidia._operations import unsupported
from eqattn.kernels.nvidia._plans import FoldArrays, SumArrays
from eqattn.kernels.nvidia._program import Run
from eqattn.kernels.nvidia._sum_program import SumProgram
from eqattn.kernels.tpu import TPULowering
from eqattn.kernels.tpu._backward import TurnedEvaluation, TurnedSums
from eqattn.kernels.tpu._program import Evaluation, Program

from ._cases import Case, KEYS


@dataclasses.dataclass
class Visit:
    """A visit of the grid that a call makes: its arguments and the parameters of its primitive."""

    args: list[Any]
    params: dict[str, Any]

    @property
    def layout(self) -> BlockGrid:
        return self.params["layout"]

    @property
    def jaxpr(self) -> Any:
        """The block function of the class that hides pairs, if there is one."""
        return dict(self.params["visits"])[min(dict(self.params["visits"]))]

    @property
    def operands(self) -> list[Any]:
        return list(self.layout.split(self.args)[1])

    def place(self, axes: Any, head: int) -> tuple[int, ...]:
        """The index of a block on some axes of the grid, whose other axes have one block."""
        sizes = self.layout.grid
        return tuple(head if sizes[a] > 1 else 0 for a in axes)

    def blocks(self, head: int, count: int) -> list[Any]:
        """What the block function reads at a head."""
        found = zip(self.operands[:count], self.layout.in_axes, self.jaxpr.in_avals)
        return [x[self.place(axes, head)].astype(a.dtype) for x, axes, a in found]


def visits(case: Case, backend: str, lse: Any) -> tuple[Visit, Visit]:
    """The visits of the output and of the gradients, with given logsumexps `[heads, queries]`."""
    dtype = jnp.dtype(jnp.float32 if backend == "tpu" else jnp.bfloat16)
    scale = {} if case.scale is None else dict(softmax_scale=jnp.float32(case.scale))
    how = AttentionMetadata(platform="interpret", backend=backend, runtime_dtype=dtype, **scale)
    unit = jnp.broadcast_to(jnp.eye(KEYS, dtype=dtype)[:, None], (1, KEYS, case.kv_heads, KEYS))
    q, g = (jnp.asarray(x, dtype) for x in (case.q, case.g))
    given = [{n: jnp.asarray(x) for n, x in xs.items()} for xs in case.arrays]
    learned = [{n: x for n, x in xs.items() if case.learned and n[0] == "f"} for xs in given]

    def gradients(given, learned, q, k, v, g):
        def f(learned, q, k, v):
            scores, mask = case.built([a | b for a, b in zip(given, learned)])
            return attention(q, k, v, Blockwise(how), mask=mask, score=scores).attention_outputs

        return jax.vjp(f, learned, q, k, v)[1](g)

    args = given, learned, q, unit, unit, g
    closed = jax.make_jaxpr(gradients)(*args)
    found: list[Visit] = []

    def step(eqn, xs):
        if (inner := calls(eqn)) is not None:
            consts = getattr(inner, "consts", ())
            return interpret(getattr(inner, "jaxpr", inner), consts, xs, step)
        if eqn.primitive not in (attend_p, sweep_p):
            return evaluated(eqn, xs)
        found.append(Visit(xs, eqn.params))
        zeros = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
        if eqn.primitive is attend_p:
            groups = case.heads // case.kv_heads
            rows = lambda x: x.reshape(1, case.kv_heads, 1, groups * x.shape[1], *x.shape[2:])
            zeros[0] = rows(case.out[0].transpose(1, 0, 2)).astype(dtype)
            zeros[-1] = jnp.asarray(rows(lse), jnp.float32)
        return zeros

    interpret(closed.jaxpr, closed.consts, jax.tree.leaves(args), step)
    first, *rest = found
    assert len(rest) == 1, [x.params["layout"] for x in rest]
    return first, rest[0]


def _gpu_operands(visit: Visit, operands: dict[int, Any], side: Any, head: int) -> Any:
    layout = visit.layout
    keys, rows = layout.block
    lengths = dict(r=rows, k=keys)

    def read(i):
        x = Operand(operands[i], layout.in_axes[i], layout, side, lengths)
        shape = [layout.grid[a] for a in layout.in_axes[i]]
        at = visit.place(layout.in_axes[i], head)
        index = int(np.ravel_multi_index(at, shape)) if shape else 0
        if x.kind is None:
            return x.value(tuple(x.array[index]))
        return x.value(x.array[index])

    return read


def of_gpu(case: Case, lse: Any, head: int) -> dict[str, Any]:
    """What kernels for GPUs compute at the pairs of a head, `[keys, rows]`, by what it is."""
    fold, sums = visits(case, "cuda", lse)
    if name := unsupported(fold.jaxpr.jaxpr):
        raise ValueError(f"a {name}, which the compiler of kernels does not know")
    found: dict[str, Any] = {}
    layout, values = fold.layout, dict(fold.params["values"])
    products = fold.params["products"]
    steps = {c: FoldStep(x, values[c], products, layout.shared) for c, x in fold.params["visits"]}
    arrays = FoldArrays(steps, layout, fold.args, list)
    program = arrays.programs[min(arrays.programs)]
    keys, rows = layout.block
    q, k = fold.blocks(head, 2)
    product = jnp.matmul(k, q, precision="highest").T
    read = _gpu_operands(fold, dict(enumerate(arrays.operands)), ROWS, head)
    plan = arrays.planned(dict(r=rows, k=keys))
    found["logits"] = program(product, read, dict(r=rows, k=keys), False)[0].T
    if plan["scale"] is not None:
        scale = read(plan["scale"]).array
        signed = product * jnp.sign(scale)
        least = jnp.maximum(jnp.abs(scale), jnp.finfo(jnp.float32).tiny)
        apart = program(signed, read, dict(r=rows, k=keys), True)[0].T
        found["logits, scaled"] = apart * least
    programs = {c: SumProgram(jaxpr, sums.layout) for c, jaxpr in sums.params["visits"]}
    program = programs[min(programs)]
    wanted = [i for i in range(len(program.gradients)) if not program.why_not([i])]
    for side in (ROWS, COLUMNS):
        mine = [i for i in wanted if program.gradient(i).side is side]
        if mine:
            found |= _gpu_pairs(sums, programs, side, mine, head)
    return found


def _gpu_pairs(sums: Visit, programs: dict, side: Any, wanted: list[int], head: int) -> dict:
    """The blocks of pairs of which a kernel adds up gradients."""
    arrays = SumArrays(programs, side, wanted, sums.layout, sums.args)
    program = programs[min(programs)]
    blocks = sums.blocks(head, len(program.jaxpr.invars))
    keys, rows = sums.layout.block
    lengths = dict(r=rows, k=keys)
    sizes = {a: lengths[a] for a in side.kinds}

    def product(eqn):
        i, j = program.factors(eqn)
        row, column = blocks[i], blocks[j]
        row = row.T if program.features[i] == 0 else row
        column = column.T if program.features[j] == 0 else column
        x = jnp.matmul(row, column.T, precision="highest")
        return x if side is ROWS else x.T

    read = _gpu_operands(sums, dict(enumerate(arrays.operands)), side, head)
    run, found = Run(program, product, read, sizes, arrays.origin), {}
    for o in arrays.wanted:
        gradient = program.gradient(o)
        x = run.times(gradient.pairs, None, {}).spread(side.kinds, sizes)
        name = {0: "pairs of keys", 1: "pairs of queries"}.get(gradient.matrix, "p of values")
        found[name] = x.T if side is ROWS else x
    return found


class _Part:
    """A part of an array, as a reference of a kernel."""

    def __init__(self, array: Any = None):
        self.array = array

    @property
    def at(self) -> Any:
        return self

    def __getitem__(self, index: Any) -> Any:
        return self if isinstance(index, tuple) else self.array

    def __setitem__(self, index: Any, x: Any) -> None:
        self.array = x


def of_tpu(case: Case, lse: Any, head: int, window: tuple[int, int]) -> dict[str, Any]:
    """What kernels for TPUs compute: logits in windows, and gradients in all forms of a step."""
    fold, sums = visits(case, "tpu", lse)
    for visit in (fold, sums):
        if name := TPULowering().unsupported_primitive(visit.jaxpr.jaxpr):
            raise ValueError(f"a {name}, which the compiler of kernels does not know")
    found: dict[str, Any] = {}
    jaxpr = fold.jaxpr
    program = Program(lambda *xs: jaxpr_as_fun(jaxpr)(*xs), jaxpr.in_avals)
    load, lies = _loaded(program.flipped, fold.blocks(head, len(jaxpr.in_avals)))
    run, out = Evaluation(program, load, lies), program.outs[0]
    keys, rows = fold.layout.block
    parts = [
        (slice(i, i + window[0]), slice(j, j + window[1]))
        for j in range(0, rows, window[1])
        for i in range(0, keys, window[0])
    ]
    logits = np.full((keys, rows), np.nan)
    for at, to in parts:
        logits[at, to] = run.at((at, to)).times(out, LOG2E) / np.float32(LOG2E)
    found["logits"] = logits
    found["logits, whole"] = Evaluation(program, load, lies).value(out)
    jaxpr = sums.jaxpr
    avals, n = jaxpr.in_avals, len(jaxpr.out_avals)

    def step(*xs):
        ys = jaxpr_as_fun(jaxpr)(*xs[n:])
        return [a + y for a, y in zip(xs[:n], ys)]

    order = [i for i in range(n) if len(jaxpr.out_avals[i].shape) == 2]
    wanted = [order[0], order[1], order[-1]]
    program = Program(step, [*jaxpr.out_avals, *avals], wanted)
    zeros = [jnp.zeros(a.shape, a.dtype) for a in jaxpr.out_avals]
    blocks = [*zeros, *sums.blocks(head, len(avals))]
    names = "gradient of queries", "gradient of keys", "gradient of values"
    found |= zip(names, program(*_loaded(program.flipped, blocks)))
    turned = TurnedSums(program, wanted)
    if turned.possible:
        total: dict[int, Any] = {}

        def add(i, part, y):
            kept = rows if turned.sums[i].kept == ROW else keys
            total.setdefault(i, np.zeros((y.shape[0], kept)))[:, part] += y

        scratch = [(_Part(), _Part()) for _ in turned.turned_again]
        run = TurnedEvaluation(program, *_loaded(turned.turned, blocks))
        turned.add(run, parts, add, scratch)
        for i, name in enumerate(names):
            x = total[i]
            found[f"{name}, turned"] = x.T if turned.sums[i].flipped else x
    # Keys may have been multiplied by the scale before.
    unit = blocks[n + 1].diagonal()[0]
    return {name: x * unit if "of keys" in name else x for name, x in found.items()}


def _loaded(turned: list[bool], blocks: list[Any]) -> tuple[list[Any], list[bool]]:
    """The functions that read blocks, some of which lie transposed."""
    flips = [t and x.ndim == 2 and min(x.shape) > 1 for t, x in zip(turned, blocks)]
    ready = [x.T if flip else x for x, flip in zip(blocks, flips)]
    return [ft.partial(lambda x: x, x) for x in ready], flips
