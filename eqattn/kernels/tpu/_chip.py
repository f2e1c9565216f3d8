"""What is known of the chips: the sizes and counts on which choices of the kernels rest.

They were chosen without a TPU. Cycles and vector memory are those of the schedules that the
compiler makes; `python tests/measure tpu-report` computes them again after a change of a constant.
"""

from jax.experimental.pallas import tpu as pltpu


VMEM = 60 * 2**20
"""The most bytes of vector memory that a kernel may ask for.

It lies a little below the 64 MiB of a core of a v7x, the least of the chips that are reported on.
"""


SPARE = 8 * 2**20
"""Bytes of vector memory that the forward kernel asks for in addition to twice those of its
buffers.

They are for what the compiler adds, such as spilled registers. What a kernel does not ask for, XLA
can give to the operands. The size was chosen by trial; `tpu-report` lists what kernels take.
"""


RESIDENT = 2**19
"""The most bytes of a small array that lies in vector memory as a whole.

The bound is for arrays with one row or column per block, such as positions, ids and maxima. To find
out at each step whether their next block must be copied takes as long as the copy. The size was
chosen by trial; the cycles of `forward, segments` and `backward` in `tpu-report` show its effect.
"""


SHORT = 2**11
"""The most pairs that a list may have if several batch elements and heads share it.

Sharing saves the step that drains the pipeline for each of them, but takes scalar memory: 8 KiB for
so many. The bound was chosen by trial; `whole kernel` in `tpu-report` shows its effect.
"""


STAYING = 32 * 2**20
"""The most bytes of vector memory for the gradients of all queries of a head.

They stay there, in two buffers, while one visit also sums those of keys and values. In float32 with
D = 128, that is enough for 32,768 queries. The rest of the memory that a kernel may ask for is left
to the blocks. A full pair of blocks took 5094 cycles in one visit and 8009 in two on v6e, and 10585
and 16082 on v5e. `backward` in `tpu-report` against `backward, queries` and
`backward, keys and values` measures it again.
"""


def cores() -> int:
    """The number of cores that share a kernel: the two of a v4 or v5p are one device."""
    try:
        return pltpu.get_tpu_info().num_cores
    except (ValueError, NotImplementedError):  # there is no TPU to ask about
        return 1


def sums_by_product() -> bool:
    """Whether the sum of the rounded probabilities is one more row of their product with values.

    Wide matrix units have time for that row. In the schedules of `tpu-report` it saves a tenth of a
    step there; on older chips it would cost a twentieth.
    """
    return wide_units()


def wide_units() -> bool:
    """Whether matrix units are 256 wide, as they are from v6e on, and not 128."""
    return generation() >= 6


def most_heads_per_step(pairs: int, width: int) -> int:
    """How many heads a step of the forward visits.

    Where matrix units are wide, the products of a pair of blocks take 1,600 cycles, and the rest of
    a step takes 400. With two heads in a step, the products of one go on during the rest of the
    other. A pair took 1971 cycles on v6e instead of 2094, and 1972 on v7x instead of 2095. On v7x
    the whole kernel for T = 4096 has a share of 37.1% instead of 35.4%. On older chips products
    take 4,096 cycles. The instructions for two must fit into the memory for these, so blocks may
    not be larger than usual.

    **Arguments:**

    - `pairs`: the pairs of query and key of a block.
    - `width`: the size of the last axis of values.
    """
    return 2 if wide_units() and pairs * width <= 2**27 else 1


def waits_for_cache(itemsize: int) -> bool:
    """Whether 512 tokens of a cache take longer to copy than to visit.

    Both take a time in proportion to the heads. They are compared in `decode` and `decode, int8` of
    `tpu-report`. Of the older chips, those with two cores have the faster memory.
    """
    if itemsize == 1:
        return generation() < 6 and cores() == 1
    return generation() < 7


def generation() -> int:
    """The generation of the chip, such as 5 for v5e and v5p; 0 without one to ask about."""
    try:
        return pltpu.get_tpu_info().generation
    except (ValueError, NotImplementedError):
        return 0
