"""Cases of the matrix that its arrays leave out, for kernels: those of `Ragged` on TPUs, and interactions
of tables, biases and dropout with blocks and groups of heads.
"""

import pytest

from matrix.cases import covering, invalid, name_of, TARGET_LIMITS
from matrix.test_conformance import check


PLAIN = covering(2)[0] | dict.fromkeys(
    ("bias", "score", "sinks", "cap", "scale", "offset", "mask"), "none"
)
PLAIN |= dict(operands="default", lead=(), dtype="float32", dropout=0.0, transform="grad")
PLAIN |= dict(length=(37, 67), block=(16, 32), heads=(4, 2), dims=(4, 7))


def of_rows() -> list:
    """Every fifth of the pairwise cases that have these kernels and give first-order gradients:
    each is as good as the others, and the 3-wise array has more of them.
    """
    cases = [case | {"target": ("tpu_ragged", 1)} for case in covering(2)]
    cases = [c for c in cases if c["transform"] in ("grad", "jit", "vmap_grad")]
    limits = TARGET_LIMITS["tpu_ragged"].items()
    return [c for c in cases if not any(c[axis] in values for axis, values in limits)][::5]


@pytest.mark.parametrize("case", of_rows(), ids=name_of)
def test_rows_on_tpus(case):
    check(case)


NARROW = {"dtype": "bfloat16"}
TABLES = dict(lead=(2,), dims=(8, 8), mask="causal", block=(16, 16))
# What differs from the plain case, of TPUs, of GPUs, and of XLA code, which repeats tables, too.
OF_TPUS = [
    TABLES | dict(score="t5", length=(61, 67), block=(16, 7), offset="int"),
    TABLES | dict(score="differences", length=(61, 67), transform="vmap", block=(128, 128)),
    TABLES | dict(score="differences", length=(32, 48), offset="array", heads=(4, 1)),
    TABLES | NARROW | dict(score="both", length=(37, 37), transform="jvp", dropout=0.25),
    TABLES | NARROW | dict(score="differences", length=(37, 37), cap="array"),
    # In the form of chips that add up probabilities by a product, dropout is not in the denominator.
    NARROW | dict(mask="causal", length=(37, 37), block=(16, 16), heads=(2, 1), dims=(8, 8))
    | dict(transform="jit", dropout=0.25),
]  # fmt: skip
OF_GPUS = [
    NARROW | dict(bias="heads", mask="and", dropout=0.25, sinks="H", cap="float", lead=(2,)),
    dict(bias="batch", mask="window", score="alibi", offset="int", dtype="float16", lead=(2,)),
    NARROW | dict(bias="full", mask="or", transform="vmap_grad", heads=(2, 2), block=(5, 3)),
    NARROW | dict(mask="dense", bias="unbatched", score="alibi", lead=(2,), block=(37, 32)),
]
OF_HOPPER = [
    # Rows of a block that are no whole tiles, tokens and features that end within one.
    NARROW | dict(heads=(6, 2), block=(32, 64), length=(70, 130), dims=(16, 8), mask="causal"),
    # Later rows, which have more to do, are written first, and not again with those before.
    NARROW | dict(heads=(2, 2), block=(64, 64), length=(130, 130), dims=(72, 24), mask="causal"),
    # Blocks that begin at odd places are copied.
    NARROW | dict(heads=(2, 1), block=(24, 40), length=(70, 90), dims=(16, 8), mask="window"),
]


OF = {
    "tpu": OF_TPUS,
    "blockwise": OF_TPUS[:4],
    "triton": OF_GPUS + OF_HOPPER[:1],
    "gpu": OF_GPUS + OF_HOPPER,
}


def cases(*targets: str):
    for target in targets:
        for change in OF[target]:
            case = PLAIN | change | dict(target=(target, 1))
            assert invalid(case) is None, case
            yield pytest.param(case, id=name_of(case))


# Those of "gpu" are nightly: the interpreter of Mosaic takes many times as long.
@pytest.mark.parametrize("case", cases("tpu", "blockwise", "triton"))
def test_interactions(case):
    check(case)
