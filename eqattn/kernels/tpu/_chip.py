"""What is known of the chips: sizes and counts that were measured, with their source."""

from jax.experimental.pallas import tpu as pltpu


SPARE = 8 * 2**20  # bytes of vector memory for the compiler


RESIDENT = 2**19  # bytes of an array
SHORT = 2**11  # pairs of a list


def cores() -> int:
    """How many cores share a kernel: the two of a v4 or v5p are one device."""
    try:
        return pltpu.get_tpu_info().num_cores
    except (ValueError, NotImplementedError):  # no TPU to ask about
        return 1


def sums_by_product() -> bool:
    """Whether the sum of the rounded probabilities is one more row of their product with values.
    Where the matrix units are 256 wide they have time for it, as the schedules show: a tenth of a
    step is saved. Elsewhere it would cost a twentieth.
    """
    try:
        return pltpu.get_tpu_info().generation >= 6
    except (ValueError, NotImplementedError):  # no TPU to ask about
        return False


STAYING = 32 * 2**20
VMEM = 60 * 2**20  # of 64 MiB on a v7x, 95 on a v5p, 128 on others
