"""The chips that are compiled for."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
    """One core of a chip.

    **Arguments:**

    - `topology`: a name that the compiler knows for some of these chips.
    - `matrix_units`: how many there are.
    - `products`: multiplications and additions that all of them can do in a cycle: those of the
        peak in bfloat16.
    - `busy`: the cycles for which one `vmatmul` occupies a matrix unit, by the size of the
        elements of its left operand. From the intervals in the compiler's own profile.
    - `delay`: how many bundles after a branch run whether it is taken or not.
    """

    topology: str
    matrix_units: int
    products: int
    busy: dict[str, int]
    delay: int


_NARROW = {"bf16": 16, "f32": 8, "x8": 16}
_WIDE = {"bf16": 8, "f32": 4, "x8": 8}

CHIPS = {
    "v5e": Chip("v5e:2x2", 4, 4 * 128**2, _NARROW, 4),
    "v5p": Chip("v5p:2x2x1", 4, 4 * 128**2, _NARROW, 4),
    "v6e": Chip("v6e:2x2", 2, 2 * 2 * 256**2, _WIDE, 4),
    "v7x": Chip("tpu7x:2x2x1", 2, 2 * 2 * 256**2, _WIDE, 6),
}
