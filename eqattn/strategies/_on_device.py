"""The fold on one device, and the base of the strategies that consist of it."""

from typing import Any, ClassVar

import equinox as eqx
import jax
from jaxtyping import Array

from .._carry import Carry
from .._misc import at_most
from .._problem.mesh import ManualAxes
from .._problem.problem import Problem
from .._problem.storage import AbstractStored
from .._sweep.lowering import Lowering, XLA
from ..kernels import BACKENDS, FIXED
from ..masks._base import split_list
from ._fold_strategy import AbstractFoldStrategy


def fold(
    problem: Problem,
    *,
    blocksize_q: int | None = None,
    blocksize_k: int | None = None,
    fused_backward: bool = True,
    in_place: bool = False,
    lowering: Lowering = XLA,
    manual: ManualAxes | None = None,
    fixed: bool = False,
) -> Carry:
    """Computes attention over all keys of a problem, block by block, on one device.

    This is what [`eqattn.Blockwise`][] and [`eqattn.Ragged`][] call, and what the `fold` of a
    strategy of yours may call. It is differentiable in every order.

    **Arguments:**

    - `problem`: one call of attention, as the `fold` of a strategy receives it.
    - `blocksize_q`, `blocksize_k`: how many queries and keys a block has; None chooses a size.
    - `fused_backward`: whether one visit of the blocks computes all gradients. Otherwise one visit
        computes those of the queries, and another those of keys and values.
    - `in_place`: whether keys and values stay as they lie in memory, and batch elements are visited
        one after the other.
    - `lowering`: the code that visits the blocks, as the strategy's `lowering(problem)` chooses it.
    - `manual`: the mesh axes to make manual, as the strategy's `manual(problem, lowering)` chooses
        them.
    - `fixed`: whether blocks keep their size where there are fewer tokens, and are padded.

    **Returns:** a [`Carry`][eqattn.Carry] without the sinks: the numerator `[B, T, H, V]`, and the
    denominator and the maximum `[B, T, H]`, where `B` stands for all batch axes.
    """
    from ._fold import fold_on_device  # a late import; the module's docstring says why

    return fold_on_device(
        problem,
        block_q=blocksize_q,
        block_k=blocksize_k,
        fused=fused_backward,
        in_place=in_place,
        lowering=lowering,
        manual=manual,
        fixed=fixed,
    )


def accumulate_in_fp32(problem: Problem, lowering: Lowering = XLA) -> Problem:
    """Prepares a problem for a strategy that folds it in two parts or more and merges their
    Carries. Gradients of what scores read, and of the scale, are then sums over the parts in the
    dtype of sums, and round once. So are those of query, key and value where the lowering is XLA's
    on a CPU. Without this, the gradient of each part would be rounded.

    **Arguments:**

    - `problem`: one call of attention, as the `fold` of a strategy receives it.
    - `lowering`: the code that visits the blocks of the parts, as for `fold`.
    """
    from .._problem import shards as wide_sums  # a late import: few strategies need it

    return wide_sums.accumulate_in_fp32(problem, lowering)


def _has_few_rows(problem: Problem) -> bool:
    """Whether a CPU would copy all keys for few rows, queries times query heads of a key head.

    Up to 32 rows of 8 times as many keys read these as they lie. On one core of a CPU, 1 to 32
    queries of 256 to 2048 keys took 0.18 to 0.85 of the time of copies. Their gradients took 0.51
    to 0.95. In float32, 64 rows took 1.7 times as long. The benchmarks `cpu-f32-full-few-1024-*`
    measure the effect. More rows count as few if a mask shows few of them to a key. A list of keys
    stays with copies, as gradients of its two parts are then summed wide.
    """
    t, s, heads, kv_heads = problem.sizes
    if jax.default_backend() != "cpu" or not (isinstance(t, int) and isinstance(s, int)):
        return False
    if split_list(problem.mask)[0] is not None:
        return False
    from .._problem.block_classes import FEW, sees_few_keys

    rows = t * (heads // kv_heads)
    return 0 < 8 * rows <= min(s, 8 * FEW) or sees_few_keys(problem)


class AbstractOnDevice(AbstractFoldStrategy):
    """Exact attention on one device, block by block. A subclass with `reads_stored` reads keys and
    values as they lie in memory, where it may; see `in_place`.
    """

    fused_backward: eqx.AbstractVar[bool]

    pallas_lowerings: ClassVar[tuple[str, ...]] = BACKENDS
    fixed_in: ClassVar[tuple[str, ...]] = FIXED

    def keys_axis(self) -> str | None:
        """A hook that names the mesh axis over which keys are sharded, such that each device
        attends to its shard. It is None if one device has all keys.
        """
        return None

    def multiplies_narrow(self) -> bool:
        """Whether the code of calls multiplies numbers narrower than float32 without widening
        them.
        """
        return (self._kernels() or XLA).multiplies_narrow()

    def in_place(self, problem: Problem, lowering: Lowering) -> bool:
        """Whether a fold leaves keys and values as they lie in memory.

        A step of decoding has few queries, and to copy all keys would cost more than its visit. A
        prompt or a step of training has many. Its visit costs more, and is faster where each head
        has its keys one after the other. So arrays are copied where a key head has as many rows,
        queries times query heads, as keys. Then the copies are no larger than queries and outputs.
        Without `reads_stored` they are copied for all but a few rows, see `_has_few_rows`.
        What is stored in pages or in fewer bits stays in place. So do the keys of `bitwise` calls,
        whose blocks must not depend on the number of queries.

        `cpu-ragged` of `python tests/measure bench` has rows of 2048 tokens and fewer. On one core
        of a CPU they took 0.52 of their time in place, and their gradients took 0.66. `prompt` and
        `forward` of `tpu-report` are kernels for both. On a v6e, 2^21 pairs of the one take 7,407
        cycles, and half as many pairs of the other take 1,948.
        """
        if self.fixed:
            return self.reads_stored
        if not self.reads_stored:
            return lowering is XLA and _has_few_rows(problem)
        arrays = not any(isinstance(x, AbstractStored) for x in (problem.key, problem.value))
        t, s, heads, kv_heads = problem.sizes
        if not arrays or not isinstance(t, int) or not at_most(s, t * (heads // kv_heads)):
            return True
        return bool(lowering.unsupported_vectors(problem.query, problem.value))

    def fold(self, problem: Problem) -> tuple[Carry, Any]:
        lowering = self.lowering(problem)
        if (axis := self.keys_axis()) is not None:
            return self._fold_over_keys(problem, axis, lowering), None
        block_q, block_k = self.block_sizes()
        carry = fold(
            problem,
            blocksize_q=block_q,
            blocksize_k=block_k,
            fused_backward=self.fused_backward,
            in_place=self.in_place(problem, lowering),
            lowering=lowering,
            manual=self.manual(problem, lowering, by_hand=self.fixed),
            fixed=self.fixed,
        )
        return carry, None

    def top(self, problem: Problem, count: int) -> tuple[Array, Array]:
        if (axis := self.keys_axis()) is not None:
            raise ValueError(
                f"top_keys does not visit keys that axis_name={axis!r} of Ragged shards; call it "
                "for the keys of each device in a jax.shard_map, and merge what it returns."
            )
        return super().top(problem, count)

    def _fold_over_keys(self, problem: Problem, axis: str, lowering: Lowering) -> Carry:
        from ._key_shards import fold_over_keys, keys_place

        given = self.metadata.mesh
        n, mesh = keys_place(axis, given)
        return fold_over_keys(
            problem,
            axis=axis,
            n=n,
            mesh=mesh,
            given_mesh=given,
            partition=self.partition(problem),
            block_q=self.metadata.blocksize_q,
            block_k=self.metadata.blocksize_k,
            fused=self.fused_backward,
            in_place=self.reads_stored,
            lowering=lowering,
        )

    def attend(self, problem: Problem, dtype: Any) -> tuple[Array, Array | None] | None:
        lowering = self.lowering(problem)
        if (output := lowering.attend(problem)) is not None:
            return output.astype(dtype), None
        if self.keys_axis() is not None or self.in_place(problem, lowering):
            return None
        if not lowering.finishes_rows:
            return None
        from ._fold import attend_on_device, visits_once

        block_q, block_k = self.block_sizes()
        manual, sizes = self.manual(problem, lowering), dict(block_q=block_q, block_k=block_k)
        if manual is not None and split_list(problem.mask)[0] is not None:
            return None  # Each device has its own lists.
        if not visits_once(problem, lowering=lowering, **sizes):
            return None  # Several visits meet as Carries.
        return attend_on_device(
            problem,
            **sizes,
            fused=self.fused_backward,
            lowering=lowering,
            manual=manual,
            fixed=self.fixed,
            dtype=dtype,
        )
