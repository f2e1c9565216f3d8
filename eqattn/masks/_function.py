"""The mask that a user's function of one pair defines."""

from collections.abc import Callable
from typing import Any, ClassVar, TYPE_CHECKING

from .._closure import function_of, held
from .._misc import as_array
from .._pairs import as_operands, Operand, scalar_result
from ._base import AbstractMask


if TYPE_CHECKING:
    _PairFn = Callable[[Any, Any, Any, Any], Any] | Callable[..., Any]
else:  # `MaskFn` checks `fn` itself, so that run-time type checkers need not
    _PairFn = Any


class MaskFn(AbstractMask):
    """A mask from a function of one pair.

    **Arguments:**

    - `fn`: `fn(b, h, q, k, *row_ids, *col_ids, *others) -> bool`, scalars in and out, from `jnp` or
        `lax` operations. It may close over arrays (`k < lengths[b]`), which may change between
        calls. What else it may read, and when it is traced again, is as for [`eqattn.ScoreFn`][].
    - `row_operands`: arrays `[*b, t]`. `fn` receives one scalar of each, that of the query.
    - `col_operands`: arrays `[*b, s]`. `fn` receives one scalar of each, that of the key.
    - `arrays`: a tuple of [`eqattn.scores.Operand`][]s. `fn` receives one scalar of each, or one
        vector if it has features.
    """

    tried_in_kernels: ClassVar[bool] = False
    may_lack_kernels: ClassVar[bool] = True

    _fn: Any
    row_operands: tuple[Any, ...]
    col_operands: tuple[Any, ...]
    arrays: tuple[Operand, ...]

    def __init__(
        self, fn: _PairFn, row_operands: Any = (), col_operands: Any = (), arrays: Any = ()
    ):
        self._fn = held(fn)
        for name, given in (("row_operands", row_operands), ("col_operands", col_operands)):
            if not isinstance(given, tuple | list):
                raise TypeError(f"{name} must be a tuple of arrays, got {type(given).__name__}.")
        self.row_operands = tuple(as_array(x, "row_operands", 1) for x in row_operands)
        self.col_operands = tuple(as_array(x, "col_operands", 1) for x in col_operands)
        self.arrays = as_operands(arrays)

    @property
    def fn(self) -> Any:
        return function_of(self._fn)

    def operands(self) -> tuple[Operand, ...]:
        rows = tuple(Operand(x, "bt") for x in self.row_operands)
        return rows + tuple(Operand(x, "bs") for x in self.col_operands) + self.arrays

    def visible(self, b: Any, h: Any, q: Any, k: Any, *ids: Any) -> Any:
        return scalar_result(self.fn, "b, h, q, k, *operands", b, h, q, k, *ids)
