"""What a (query, key) pair is worth: transforms of a logit, for `attention(..., score=...)`."""

from ._pairs import Operand as Operand
from ._scores import (
    AbstractScore as AbstractScore,
    ALiBi as ALiBi,
    Bias as Bias,
    ScoreFn as ScoreFn,
    SoftCap as SoftCap,
    T5Bias as T5Bias,
)
