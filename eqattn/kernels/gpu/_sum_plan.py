"""How sums of gradients on one side are cut into programs, for Hopper."""

import dataclasses
import functools as ft
from typing import Any, ClassVar

from . import _mosaic as mosaic
from ._operands import rounded_up, TILE
from ._plans import SumPlan


STREAMED = 64
"""The least number of queries or keys of the other side that a tile has."""

REGISTERS = 128
"""How many registers of a thread may hold sums. A thread has 255, and the pairs of a tile take as
many as the sums.
"""

FEW_REGISTERS = 64
"""With so many registers for sums, or fewer, the pairs of tiles with twice `STREAMED` fit, too."""

SHARED = 227 * 1024
"""The bytes of shared memory that a program may have."""


@dataclasses.dataclass(frozen=True)
class Plan(SumPlan):
    """Sums by this kernel.

    **Arguments:** those of `SumPlan`, and

    - `length`, `other`: the lengths of a block on the side and on the other, before they are
        padded.
    - `tile`: how many queries or keys of the other side are multiplied at once.
    """

    length: int
    other: int
    tile: int

    lists: ClassVar[int] = 3
    """How many lists of live blocks a program reads, if there is a table."""

    def watched(self, i: int) -> list[int]:
        """The grid axes of what says whether a matrix has numbers that are not finite."""
        return [a for a in self.layout.in_axes[i] if a != self.side.other]

    @property
    def tiles(self) -> int:
        """How many programs a block has."""
        return rounded_up(self.length, TILE) // TILE

    @property
    def parts(self) -> int:
        """How many tiles a block of the other side has."""
        return rounded_up(self.other, self.tile) // self.tile

    @property
    def features(self) -> dict[int, int]:
        """The number of features of each matrix, padded."""
        return {i: x.features for i, x in self.matrices.items()}

    @property
    def widths(self) -> dict[int, int]:
        """The number of features of each result, padded."""
        program = self.programs[max(self.programs)]
        return {o: self.features[program.gradient(o).matrix] for o in self.wanted}

    @property
    def stages_parts(self) -> bool:
        """Whether some result needs additional shared memory on its way out, for a part of its
        columns. This is so where no matrix of the program has its shape.
        """
        held = [self.features[i] for i in self.own]
        return any(x is not None and x.features not in held for x in self.results.values())

    @property
    def stages(self) -> list[int]:
        """How many tiles of each matrix of the other side shared memory holds."""
        rest = len(self.streamed) - 1
        own = sum(self.features[i] for i in self.own) + mosaic.WARPGROUP * self.stages_parts
        for stages in ([2] * (1 + rest), [2] + [1] * rest):
            tiles = sum(n * self.features[i] for n, i in zip(stages, self.streamed))
            # A vector takes a kilobyte, as its address is a multiple of that.
            numbers = 2 * mosaic.WARPGROUP * own + self.tile * tiles
            if 2 * numbers + 1024 * (1 + len(self.staged)) <= SHARED:
                return stages
        return [1] * (1 + rest)

    def scratch(self) -> tuple:
        """Allocates shared memory and barriers. The memory is `(own matrices, tiles, vectors beside
        tiles, part of a result)`. The barriers are `(own matrices, tiles have arrived)`, `tiles are
        free`, and one at which both warpgroups meet.
        """
        own = [
            mosaic.matrices((2, mosaic.WARPGROUP, self.features[i]), self.dtype) for i in self.own
        ]
        tiles = [
            mosaic.matrices((n, self.rows[i], self.features[i]), self.dtype)
            for i, n in zip(self.streamed, self.stages)
        ]
        of = ft.partial(mosaic.vectors, self.stages[0], self.tile)
        vectors = [of(self.operands[i].dtype) for i in self.staged]
        with_it = [self.copies_of(i) for i in self.streamed]
        with_it[0] += len(vectors)
        arrived = [
            mosaic.Barrier(num_arrivals=x, num_barriers=n) for x, n in zip(with_it, self.stages)
        ]
        free = [mosaic.Barrier(num_arrivals=2, num_barriers=n) for n in self.stages]
        mine = [self.matrices[i].copies(mosaic.WARPGROUP) for i in self.own]
        here = [mosaic.Barrier(num_arrivals=x, num_barriers=2) for x in mine]
        square = (2, mosaic.WARPGROUP, mosaic.WARPGROUP)
        part = [mosaic.matrices(square, self.part_dtype)] * self.stages_parts
        return (own, tiles, vectors, part), (here, arrived), free, mosaic.Barrier(num_arrivals=2)

    @property
    def rows(self) -> dict[int, int]:
        """How many rows a tile of each streamed matrix has."""
        return dict.fromkeys(self.streamed, self.tile)

    def copies_of(self, i: int) -> int:
        """How many copies such a tile takes."""
        return self.matrices[i].copies(self.tile)

    @property
    def part_dtype(self) -> Any:
        """The dtype of a part of a result on its way out."""
        return self.dtype
