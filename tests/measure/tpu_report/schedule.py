"""Reads the schedule of one kernel, as the compiler of TPUs dumps it.

In the file of bundles after register allocation, a bundle is a cycle: where the machine waits, the
bundle is empty. The final bundles, in a later file, cannot be used, as they have delays in place of
empty bundles. A second file has as many lines as there are cycles, with the slots that each bundle
uses.
"""

import dataclasses
import re
from pathlib import Path

import numpy as np

from .chips import Chip


# What the compiler calls the files that are read here.
PASSES = "packed-bundles-post-ra|pre-delay|post-bundle-packing-post-ra|overlay-graph|hlo-details"

_BUNDLE = re.compile(r"\s*(0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*:[> ]*\{(.*)", re.DOTALL)
_BRANCH = re.compile(r"sbr\.rel(?:\s*\((!?)%(p\d+)\w*\))?\s.*?target bundleno = (\d+)", re.DOTALL)
_PRODUCT = re.compile(r"vmatmul[a-z0-9_.]*")
_VMEM = re.compile(r"space=vmem, size = (0x[0-9a-f]+|\d+), offset = (0x[0-9a-f]+|\d+)")
_EDGE = re.compile(r'"#(\d+):[^"]*" -> "#(\d+):')


@dataclasses.dataclass(frozen=True)
class Branch:
    """A jump from cycle `at` to cycle `target`, taken if `predicate` is `value`, or always."""

    at: int
    target: int
    predicate: str | None
    value: bool


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What a kernel does in each cycle.

    **Arguments:**

    - `chip`: the chip that it is compiled for.
    - `products`: for how many cycles the products that start occupy matrix units, int `[cycles]`.
    - `slots`: how many slots of each kind are in use, int `[cycles]` by name.
    - `capacity`: how many slots of each kind there are.
    - `branches`: the jumps, in the order of their cycles.
    - `vmem`: the vector memory that the kernel allocates, in bytes.
    """

    chip: Chip
    products: np.ndarray
    slots: dict[str, np.ndarray]
    capacity: dict[str, int]
    branches: tuple[Branch, ...]
    vmem: int

    @property
    def cycles(self) -> int:
        return len(self.products)


def dumped(folder: Path, call: str) -> list[str]:
    """For each kernel that is called `call`, the text with which the names of its files start."""
    name = re.compile(rf"(\d+-{re.escape(call)}(?:\.\d+)?)-\d+-packed-bundles-post-ra\.txt")
    return sorted(m[1] for p in folder.iterdir() if (m := name.fullmatch(p.name)))


def read(folder: Path, start: str, chip: Chip) -> Schedule:
    """Reads the schedule whose files' names begin with `start`.

    **Raises:** `ValueError` if the files do not have the form that this code was written for, as
    another compiler may write them.
    """

    def text(kind: str) -> str:
        pattern = re.compile(rf"{re.escape(start)}-\d+-{kind}\.txt")
        paths = [p for p in folder.iterdir() if pattern.fullmatch(p.name)]
        if len(paths) != 1:
            raise ValueError(f"the compiler wrote {len(paths)} files {kind} of {start}, not one")
        return paths[0].read_text(errors="replace")

    capacity, slots = _utilisation(text("pre-delay_hlo-static-per-bundle-utilization"))
    bundles = _bundles(text("packed-bundles-post-ra"))
    cycles = {len(bundles), *map(len, slots.values())}
    if len(cycles) != 1:
        raise ValueError(f"the files of {start} have different numbers of cycles: {cycles}")
    products = np.array([_occupied(b, chip) for b in bundles])
    branches = tuple(
        Branch(at, int(m[3]), m[2], not m[1])
        for at, bundle in enumerate(bundles)
        for m in _BRANCH.finditer(bundle)
    )
    allocated = _VMEM.findall(text("post-bundle-packing-post-ra"))
    vmem = max((int(size, 0) + int(offset, 0) for size, offset in allocated), default=0)
    return Schedule(chip, products, slots, capacity, branches, vmem)


def overlays(folder: Path, call: str) -> tuple[int, int]:
    """How a kernel is cut into overlays.

    Instruction memory is small. So a program is cut into overlays. One of them is there at a time,
    and the next is fetched where the program enters it. The compiler tells in which overlays the
    instructions of a kernel lie, and which of them may follow which.

    **Returns:** the number of overlays that hold instructions of the kernel, and the number of ways
    back from one of them to an earlier one. A loop that has such a way in it fetches its
    instructions again at each trip.

    **Raises:** `ValueError` if the compiler did not tell.
    """
    place = re.compile(
        rf"%{re.escape(call)}(?:\.\d+)? = .* custom-call\(.*\n"
        r"\s*emitted bundle range: \[\w+:(\d+):\w+, \w+:(\d+):\w+\)"
    )
    # The details are written before and after the program is cut: the later file counts.
    found = []
    for path in folder.glob("*-hlo-details.txt"):
        program, _, number = path.name.removesuffix("-hlo-details.txt").rpartition("-")
        if match := place.search(path.read_text(errors="replace")):
            found.append((int(number), program, int(match[1]), int(match[2])))
    if not found:
        raise ValueError(f"the compiler did not tell where the instructions of {call} lie")
    _, program, first, last = max(found)
    (graph,) = folder.glob(f"{program}-*-overlay-graph.txt")
    edges = {(int(a), int(b)) for a, b in _EDGE.findall(graph.read_text())}
    return last - first + 1, sum(first <= b < a <= last for a, b in edges)


def _utilisation(text: str) -> tuple[dict[str, int], dict[str, np.ndarray]]:
    head, _, body = text.partition("== UTILIZATION:")
    _, names, capacity = head.strip().splitlines()
    columns = [name.strip() for name in names.split(",")]
    table = np.array(body.split(), int).reshape(-1, len(columns))
    return dict(zip(columns, map(int, capacity.split()))), dict(zip(columns, table.T))


def _bundles(text: str) -> list[str]:
    """The text of each bundle, which may take several lines."""
    found: list[str] = []
    for line in text.splitlines():
        if m := _BUNDLE.match(line):
            if int(m[1], 0) != len(found):
                raise ValueError(f"cycle {len(found)} is followed by {m[1]}")
            found.append(m[2])
        elif found:
            found[-1] += "\n" + line
    return found


def _occupied(bundle: str, chip: Chip) -> int:
    kinds = (next((k for k in ("f32", "bf16") if k in op), "x8") for op in _PRODUCT.findall(bundle))
    return sum(chip.busy[kind] for kind in kinds)
