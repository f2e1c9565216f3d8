"""The figures of a kernel, and of a whole call, on a chip, as data."""

import dataclasses
from typing import Any

from ..results_file import RowFile


@dataclasses.dataclass(frozen=True)
class Row:
    """The schedule of one kernel on one chip.

    **Arguments:**

    - `kernel`, `chip`: their names.
    - `plain`: for a kernel with a feature, the name of the kernel without it; else empty.
    - `tile`: how many queries and keys a block has.
    - `cycles`: the cycles of a step of the grid, with its overhead, on a pair of blocks that is not
        masked. Where a step has such a pair for each of several heads, they are shared out.
    - `masked`: the cycles of a step on a masked pair; None if there is no difference.
    - `useful`: the share of `cycles` that the products would take at the matrix units' peak.
    - `whole`: that share for the whole kernel and its visible pairs; None if it is not known.
    - `memory`: the share of `cycles` that reading the bytes of a step from main memory takes; None
        if memory is not what limits the kernel.
    - `units`: the share of each unit's slots that is used.
    - `spills`, `fills`: how many registers such a step stores, and loads again.
    - `vmem`: how many bytes of vector memory the kernel allocates.
    - `overlays`: into how many overlays its instructions are cut; None where it was not recorded.
    - `back`: the number of ways back from one of them to an earlier one, see `schedule.overlays`.
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
    overlays: int | None = None
    back: int = 0

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


@dataclasses.dataclass(frozen=True)
class CallRow:
    """The costs of a whole call on one chip.

    **Arguments:**

    - `call`, `chip`: their names.
    - `total`: how many bytes its instructions move to and from main memory.
    - `outside`: those of them that no kernel moves.
    - `temporary`: the bytes of main memory that it takes in addition to arguments and results.
    - `cycles`: how many cycles its kernels take.
    - `kernel_ms`, `outside_ms`: milliseconds of its kernels at the clock of the chip, and of other
        bytes at the bandwidth of its memory.
    """

    call: str
    chip: str
    total: int
    outside: int
    temporary: int
    cycles: int
    kernel_ms: float
    outside_ms: float

    @property
    def key(self) -> tuple[str, str]:
        return self.call, self.chip

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "CallRow":
        return cls(**fields)


FILE = RowFile("tpu-report", "versions", Row.from_dict)
CALLS_FILE = RowFile("tpu-report --call", "versions", CallRow.from_dict)
