"""Scores: transforms of the logit of one (query, key) pair, for `attention(..., score=...)`."""

import typing as _typing
from collections.abc import Callable as _Callable

from .._misc import late_imports as _late_imports
from .._pairs import Operand as Operand
from ._alibi import ALiBi as ALiBi
from ._base import AbstractScore as AbstractScore
from ._bias import Bias as Bias
from ._function import ScoreFn as ScoreFn
from ._soft_cap import SoftCap as SoftCap


if _typing.TYPE_CHECKING:
    from ._t5 import T5Bias as T5Bias


__getattr__: _Callable[[str], _typing.Any]
__dir__: _Callable[[], list[str]]
__getattr__, __dir__ = _late_imports(__name__, {"T5Bias": "_t5"})
