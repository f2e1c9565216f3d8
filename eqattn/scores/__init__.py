"""Scores: transforms of the logit of one (query, key) pair, for `attention(..., score=...)`."""

import typing as _typing
from collections.abc import Callable as _Callable

from .._misc import late_imports as _late_imports
from .._pairs import Operand as Operand
from ._base import AbstractScore as AbstractScore, Bias as Bias, SoftCap as SoftCap
from ._function import ScoreFn as ScoreFn
from ._positional import ALiBi as ALiBi


if _typing.TYPE_CHECKING:
    from ._dropout import dropout_mask as dropout_mask
    from ._positional import T5Bias as T5Bias


__getattr__: _Callable[[str], _typing.Any]
__dir__: _Callable[[], list[str]]
__getattr__, __dir__ = _late_imports(
    __name__, {"dropout_mask": "_dropout", "T5Bias": "_positional"}
)
