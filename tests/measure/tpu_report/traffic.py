"""Counts the bytes that a compiled program moves between main memory and its units.

The compiler writes the program in the order in which it runs, with the layout of every array. A
layout says which axis is the innermost, into which tiles the array is padded, and whether it lies
in main memory. An instruction counts as if it read its operands and wrote its results once. So the
count of a fusion that reads only a part of an operand is too high. That of a kernel that reads a
block again for each row is too low.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path


_NOTHING = {"parameter", "constant", "bitcast", "get-tuple-element", "tuple", "after-all"}
"""Instructions that move nothing: they name what is there."""

_LOOPS = {"while", "conditional", "call"}

_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%(\S+) = (.*?) ([a-z][\w-]*)\((.*)")
_ARRAY = re.compile(r"(pred|[a-z]+(\d+)\w*)\[([\d,]*)\](?:\{([\d,]*)(?::([^}]*))?\})?")


@dataclasses.dataclass(frozen=True)
class Move:
    """What one instruction moves.

    **Arguments:**

    - `name`, `opcode`: the name and the operation of the instruction.
    - `result`: the text of its type.
    - `nbytes`: how many bytes it reads from main memory and writes there.
    """

    name: str
    opcode: str
    result: str
    nbytes: int

    @property
    def kernel(self) -> bool:
        return self.opcode == "custom-call"


def dumped(folder: Path) -> str:
    """The largest of the programs that the compiler left in a folder."""
    files = sorted(folder.glob("*-TLP-hlo.txt"), key=lambda path: path.stat().st_size)
    if not files:
        raise ValueError(f"the compiler left no program in {folder}")
    return files[-1].read_text()


def moves(program: str) -> list[Move]:
    """The instructions of a scheduled program that may move bytes, in their order.

    **Raises:** `ValueError` for a program with a loop, whose trips are not known.
    """
    sizes: dict[str, list[int]] = {}
    found, steps = [], set()
    for line in program[program.index("\nENTRY") :].splitlines():
        if (match := _INSTRUCTION.match(line)) is None:
            continue
        name, result, opcode, rest = match.groups()
        sizes[name] = array_bytes(result)
        if opcode in _LOOPS:
            raise ValueError(f"the bytes of {name} are not known: it is a {opcode}")
        operands = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
        if opcode.startswith("custom-call-"):  # what passes between its steps is no array
            steps.add(name)
            operands = [x for x in operands if x not in steps]
        read = [n for x in operands for n in sizes.get(x, [])]
        nbytes = _moved(opcode, read, sizes[name])
        if nbytes is not None:
            found.append(Move(name, opcode, result, nbytes))
    return found


def _moved(opcode: str, read: Sequence[int], written: Sequence[int]) -> int | None:
    """How many bytes an instruction moves; None if it moves none in any program."""
    if opcode.startswith("custom-call-"):
        # A sparse core transposes while kernels run. The steps of that are a start without
        # operands, an update, which has them, and the end, which has the result.
        step = opcode.removeprefix("custom-call")
        return {"-update": sum(read), "-done": sum(written)}.get(step)
    if opcode in ("copy-start", "slice-start"):
        # The result of a start also names its operand, and a word for its end. What is moved is the
        # operand or a slice of it, from main memory or to it.
        return min((n for n in written if n > 4), default=0)
    if opcode in _NOTHING or opcode.endswith(("-done", "-update")):
        return None
    return sum(read) + sum(written)


def array_bytes(result: str) -> list[int]:
    """The bytes of each array of a type, tiles included; 0 for one that is not in main memory."""
    found = []
    for kind, bits, shape, order, more in _ARRAY.findall(result):
        sizes = [int(n) for n in shape.split(",") if n]
        axes = [int(n) for n in order.split(",") if n]
        inner = [sizes[a] for a in axes] if len(axes) == len(sizes) else sizes[::-1]
        if tile := re.match(r"T\(([\d,]+)\)", more):
            for i, n in enumerate([int(n) for n in tile[1].split(",")][::-1][: len(inner)]):
                inner[i] = -(-inner[i] // n) * n
        width = 1 if kind == "pred" else max(int(bits) // 8, 1)
        found.append(0 if "S(" in more else width * math.prod(inner))
    return found
