"""What is reported of a kernel on a chip, as data."""

import dataclasses
from typing import Any

from ..results_file import RowFile


@dataclasses.dataclass(frozen=True)
class Row:
    """The schedule of one kernel on one chip.

    **Arguments:**

    - `kernel`, `chip`: their names. `plain`: of a kernel with a feature, that without it.
    - `tile`: queries and keys of a block.
    - `cycles`: of a step of the grid, with its overhead, on a pair of blocks that is not masked.
    - `masked`: on one that is; None if there is no difference.
    - `useful`: the share of `cycles` that the products would take at the matrix units' peak.
    - `whole`: the same of the whole kernel and its visible pairs; None if not known.
    - `memory`: the share of `cycles` that the bytes of a step take from main memory; None if
        that is not what limits the kernel.
    - `units`: the share of each unit's slots that is used.
    - `spills`, `fills`: registers stored and loaded again in such a step.
    - `vmem`: bytes of vector memory.
    """

    kernel: str
    chip: str
    plain: str
    tile: tuple[int, int]
    cycles: int
    masked: int | None
    useful: float | None
    whole: float | None
    memory: float | None
    units: dict[str, float]
    spills: int
    fills: int
    vmem: int

    @property
    def key(self) -> tuple[str, str]:
        return self.kernel, self.chip

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Row":
        fields = dict(fields)
        queries, keys = fields.pop("tile")
        return cls(tile=(queries, keys), **fields)


FILE = RowFile("tpu-report", "versions", Row.from_dict)
