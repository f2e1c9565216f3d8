"""The chips for which kernels are compiled."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
    """One core of a chip.

    **Arguments:**

    - `topology`: the compiler's name for a group of these chips.
    - `matrix_units`: how many matrix units a core has.
    - `products`: how many multiplications, each with an addition, all matrix units do in a cycle at
        the peak in bfloat16.
    - `busy`: how many cycles one `vmatmul` occupies a matrix unit, by the type of the elements of
        its left operand. The numbers are from the intervals in the compiler's own profile.
    - `delay`: how many bundles after a branch run whether it is taken or not.
    """

    topology: str
    matrix_units: int
    products: int
    busy: dict[str, int]
    delay: int


# `busy` for chips whose matrix units have 128 x 128 multipliers, and for those with 256 x 256.
_NARROW = {"bf16": 16, "f32": 8, "x8": 16}
_WIDE = {"bf16": 8, "f32": 4, "x8": 8}

CHIPS = {
    "v5e": Chip("v5e:2x2", 4, 4 * 128**2, _NARROW, 4),
    "v5p": Chip("v5p:2x2x1", 4, 4 * 128**2, _NARROW, 4),
    "v6e": Chip("v6e:2x2", 2, 2 * 2 * 256**2, _WIDE, 4),
    "v7x": Chip("tpu7x:2x2x1", 2, 2 * 2 * 256**2, _WIDE, 6),
}
