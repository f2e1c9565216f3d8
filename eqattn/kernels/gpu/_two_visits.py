"""Folds that visit blocks a second time where something is not finite.

By a product, a value that is not finite reaches all rows, and not only those that see its key. That
is against the contract of `_sweep/nonfinite.py`. It is rare. So a first kernel multiplies what is
there, and says for each program whether its sums are finite. A second kernel follows. Its programs
visit their blocks again if the sums are not, and clean the tiles in shared memory. Otherwise they
do nothing.

Other ways have a price. To look at all values before the first visit takes the time of reading
them. One kernel for both visits has more registers than the first one, or spills more. If XLA
decided, the host would have to wait for the device.

Backward passes do look before, as the sums of a gradient would take shared memory that long vectors
leave no room for.
"""

import abc
import dataclasses
import functools as ft
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..._jax import abstract
from . import _mosaic as mosaic


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoVisits(abc.ABC):
    """A plan whose blocks are visited once or twice, each time by a kernel.

    **Arguments:**

    - `again`: whether this is the second visit.
    """

    again: bool = False

    @property
    @abc.abstractmethod
    def spreads(self) -> bool:
        """Whether what is not finite may reach results that it must not reach."""

    @property
    def computing(self) -> int:
        """How many warpgroups of a program have results."""
        return 2

    @abc.abstractmethod
    def scratch(self) -> tuple:
        """Allocates shared memory and barriers."""

    @abc.abstractmethod
    def visit(self, refs: Sequence[Any], scratch: Sequence[Any]) -> None:
        """What a program does with its references. After the results comes, if the first visit is
        followed by another one, an array for `note`.
        """

    def _body(self, *refs: Any) -> None:
        inner = len(self.scratch())
        given, scratch = refs[:-inner], refs[-inner:]
        if not self.again:
            self.visit(given, scratch)
            return
        check, *rest = given
        found = [check[i, lax.axis_index("program")] for i in range(self.computing)]
        mosaic.when(ft.reduce(jnp.add, found) != 0)(lambda: self.visit(rest, scratch))

    def note(self, check: Any, warpgroup: Any, sums: Any, memory: Any) -> None:
        """Notes whether the sums `[rows, n]` of a warpgroup are finite: by 0, or else by NaN.

        **Arguments:**

        - `check`: the array, `[warpgroups, programs]`.
        - `memory`: shared memory for a number of each row.
        """
        mosaic.store((sums * 0).sum(1), memory)
        mosaic.commit_smem()
        check[warpgroup, lax.axis_index("program")] = mosaic.load(memory, "other").sum()

    def run(
        self,
        out: Sequence[Any],
        inputs: Sequence[Any],
        name: str,
        programs: int,
        interpreted: bool,
        warpgroups: int = 2,
    ) -> list[Any]:
        """What the visits have computed.

        **Arguments:**

        - `out`: the shapes and dtypes of the results.
        - `inputs`: what the kernels read.
        - `name`, `programs`, `interpreted`, `warpgroups`: as for `mosaic.kernel`.
        """

        def kernel(plan, out, *inputs):
            given = plan._body, out, programs, name + "_again" * plan.again, plan.scratch()
            return mosaic.kernel(*given, interpreted, warpgroups)(*inputs)

        if not self.spreads:
            return kernel(self, out, *inputs)
        check = abstract(inputs[0], (self.computing, programs), jnp.float32)
        *found, check = kernel(self, [*out, check], *inputs)
        again = dataclasses.replace(self, again=True)
        return mosaic.in_place(lambda *refs: kernel(again, [], check, *inputs, *refs), found)
