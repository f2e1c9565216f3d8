"""Masks that hide padding: keys or queries beyond the length of their sequence."""

from typing import Any

from .._misc import as_int, Static, unwrap
from .._pairs import Operand
from ._base import AbstractMask, int_operand


class KeyPadding(AbstractMask):
    """Only the keys at positions `starts <= k < lengths` are visible.

    **Arguments:**

    - `lengths`: the position after the last visible key: a Python int, which is static, or an int
        array, scalar or `[*b]`.
    - `starts`: the position of the first visible key, likewise. The default is 0.
    """

    _lengths: Any
    _starts: Any

    def __init__(self, lengths: Any, starts: Any = 0):
        if "bool" in str(getattr(lengths, "dtype", "")):
            raise TypeError(
                f"lengths must be integers [*b], got bools {lengths.shape}: give mask.sum(-1) if "
                "padding comes last, else the mask DenseMask(mask[..., None, None, :])."
            )
        self._lengths = as_int(lengths, "lengths")
        self._starts = as_int(starts, "starts")

    @property
    def lengths(self) -> Any:
        return unwrap(self._lengths)

    @property
    def starts(self) -> Any:
        return unwrap(self._starts)

    def operands(self) -> tuple[Operand, ...]:
        return int_operand(self._lengths) + int_operand(self._starts)

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        given = iter(ids)
        length = self.lengths if isinstance(self._lengths, Static) else next(given)
        start = self.starts if isinstance(self._starts, Static) else next(given)
        return (k >= start) & (k < length)


class QueryPadding(AbstractMask):
    """Only the queries at positions `q < lengths` see anything.

    **Arguments:**

    - `lengths`: the position after the last query: a Python int, which is static, or an int array,
        scalar or `[*b]`.
    """

    _lengths: Any

    def __init__(self, lengths: Any):
        self._lengths = as_int(lengths, "lengths")

    @property
    def lengths(self) -> Any:
        return unwrap(self._lengths)

    def operands(self) -> tuple[Operand, ...]:
        return int_operand(self._lengths)

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        (length,) = ids or (self.lengths,)
        return q < length
