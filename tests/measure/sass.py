"""The loops of machine code for NVIDIA GPUs, and a model of how long a turn of one takes.

The model counts what each unit of a Hopper's multiprocessor does for the four warps of a warpgroup.
Each unit has the rate that is published for it. The units work side by side. So a turn takes at
least as long as the unit that takes longest, the *bound*. Nothing else is modelled: neither how
long a result takes to come, nor the order of instructions, nor global memory.
"""

import re
from collections.abc import Sequence
from typing import Any


TILE_EXPONENTIALS = 16
"""What a thread takes of the smallest tile, 64 rows of 32 keys in 128 threads."""

UNITS = ("tensor", "float", "integer", "special", "shared", "issue")
"""The tensor cores, the units of floats (which multiply integers, too), those of integers,
comparisons and selections, and those of exponentials. Shared memory and the issue of instructions
follow.
"""

# Rates are lanes per cycle of a multiprocessor. They are those of compute capability 9.0 in the
# table "Throughput of Native Arithmetic Instructions" of NVIDIA's CUDA C++ Best Practices Guide.
# The table has no line for selections, moves and the rounding of two floats to one register. These
# are taken as comparisons and conversions, whose rate is 64. The rates of float32 and of integers
# were checked in a source of XLA that cites the table. The others were not, as it was not at hand.
_FLOAT, _MULTIPLY, _INTEGER, _SPECIAL = 128, 64, 64, 16

# The tensor cores of a multiprocessor multiply and add 2048 pairs of 16 bits a cycle. So NVIDIA's
# paper "H100 Tensor Core GPU Architecture" says: 989 TFLOP/s by 132 multiprocessors at 1.83 GHz.
_TENSOR = 2048

# Shared memory gives 128 bytes a cycle, one number to each of 32 banks (CUDA C++ Programming Guide,
# section on shared memory). Shuffles move 32 lanes a cycle in the same unit.
_BYTES, _LANE = 128, 4

_THREADS = 128
"""The threads of a warpgroup. Each of its four warps has a quarter of the multiprocessor."""

_ON_FLOATS = re.compile(r"(F(ADD|MUL|FMA)|H(ADD2|MUL2|FMA2))(32I)?$")
_ON_SPECIAL = re.compile(r"(MUFU|I2F|F2I|F2F|FRND)$")
# What takes an instruction slot only: barriers, branches, uniform registers, copies, and global
# memory, which is not modelled.
_ONLY_ISSUED = re.compile(
    r"(U[A-Z].*|R2UR|S2U?R|CS2R|BRA|BSSY|BSYNC|BRX|CALL|RET|EXIT|NOP|NANOSLEEP|SYNCS|BAR|DEPBAR"
    r"|WARPGROUP|WARPSYNC|MEMBAR|FENCE|CCTL|LDC|LDG.*|STG|LD|ST|LDL|STL|ELECT|VOTE.*|ERRBAR)$"
)
_PRODUCT = re.compile(r"HGMMA\.64x(\d+)x16\S*\s+\w+,\s*(\w+)")
_WIDTH = re.compile(r"\.(?:M88\.)?(64|128|4|2)\b")


def hot_loops(
    listing: str, product: str = "HGMMA", least: int = TILE_EXPONENTIALS
) -> list[list[str]]:
    """The loops that multiply matrices and take exponentials, as instructions, in the order of the
    program. If loops overlap, as a loop and one that waits inside of it do, the shortest counts.

    **Arguments:**

    - `product`: a regular expression for the instructions that multiply.
    - `least`: how many exponentials a loop has at least.
    """
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if match := re.match(r"\s*(\.L_x_\d+):", line):
            labels[match[1]] = len(instructions)
        elif match := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;?\s*$", line):
            instructions.append(match[1])
    spans = set()
    for end, text in enumerate(instructions):
        target = re.search(r"BRA.*?(\.L_x_\d+)", text)
        if target and labels.get(target[1], end + 1) <= end:
            start = labels[target[1]]
            body = " ".join(instructions[start : end + 1])
            if re.search(product, body) and body.count("MUFU.EX2") >= least:
                spans.add((start, end))
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans, key=lambda span: span[1] - span[0]):
        if all(end < a or b < start for a, b in found):
            found.append((start, end))
    return [instructions[start : end + 1] for start, end in sorted(found)]


def _named(text: str) -> tuple[str, str]:
    """An instruction without the predicate before it, and its name without what follows a dot."""
    text = re.sub(r"^@!?U?P\w+\s+", "", text)
    return text, re.split(r"[.\s]", text, maxsplit=1)[0]


def _product(text: str) -> tuple[int, bool]:
    """The columns of a product of 64 rows and 16 numbers, and whether its left side is in shared
    memory. There are 0 for another instruction.
    """
    found = _PRODUCT.search(text)
    return (int(found[1]), found[2] == "gdesc") if found else (0, False)


def _bytes(text: str, name: str) -> int:
    """The bytes of shared memory that an instruction moves for a warpgroup."""
    columns, reads_left = _product(text)
    if columns:  # the numbers of both sides, or of the right one
        return 2 * 16 * (columns + 64 * reads_left)
    if name == "SHFL":
        return _LANE * _THREADS
    if not re.match(r"(LDS|STS|LDSM|STSM|ATOMS)$", name):
        return 0
    width = _WIDTH.search(text.split()[0])
    size = {"64": 8, "128": 16, "4": 16, "2": 8}[width[1]] if width else 4
    return size * _THREADS


def units(body: Sequence[str]) -> dict[str, int]:
    """The cycles of each unit in a turn of a loop, for one warpgroup."""
    cycles = dict.fromkeys(UNITS, 0.0) | {"issue": float(len(body))}
    for text, name in map(_named, body):
        columns, _ = _product(text)
        moved = _bytes(text, name)
        cycles["tensor"] += 64 * columns * 16 / _TENSOR
        cycles["shared"] += moved / _BYTES
        if columns or moved or _ONLY_ISSUED.match(name):
            continue
        if _ON_FLOATS.match(name):
            cycles["float"] += _THREADS / _FLOAT
        elif name == "IMAD":
            cycles["float"] += _THREADS / _MULTIPLY
        elif _ON_SPECIAL.match(name):
            cycles["special"] += _THREADS / _SPECIAL
        else:
            cycles["integer"] += _THREADS / _INTEGER
    return {name: round(x) for name, x in cycles.items()}


MODEL = ("cycles", "bound", "share", "alone")
"""What the model says of a turn of a loop, for one warpgroup. First come the cycles of its bound,
and the bound. Then comes the share of the tensor cores' peak, if all units work at once. The last
is that share if tensor cores rest while the other units work.
"""


def modelled(cycles: dict[str, int] | None) -> tuple[Any, ...]:
    """The figures of `MODEL`, of what `units` counted. Shares are per cent."""
    if cycles is None:
        return ("",) * len(MODEL)
    bound = max(UNITS, key=lambda unit: cycles[unit])
    tensor, rest = cycles["tensor"], ("float", "integer", "special", "issue")
    alone = tensor / (tensor + max(cycles[unit] for unit in rest))
    return cycles[bound], bound, round(100 * tensor / cycles[bound]), round(100 * alone)
