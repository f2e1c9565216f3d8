"""Scores: transforms of the logit of one (query, key) pair, for `attention(..., score=...)`."""

from .._pairs import Operand as Operand
from ._alibi import ALiBi as ALiBi
from ._base import AbstractScore as AbstractScore
from ._bias import Bias as Bias
from ._function import ScoreFn as ScoreFn
from ._soft_cap import SoftCap as SoftCap
from ._t5 import T5Bias as T5Bias
