"""The block function of logits: a product, and what masks and scores do to it pair by pair."""

from collections.abc import Callable
from typing import Any

from jax import lax

from ..._jax import Literal
from ..._sweep.products import dot_p
from ._operations import Native, PLAIN, Value
from ._program import BlockProgram, Run


class PairProgram(BlockProgram):
    """The block function of logits: one product, and what is done to it pair by pair. Arguments 0
    and 1 are the queries and the keys.

    `reads` says of each argument whether the results depend on it other than by the product.
    `scale` is the argument by which logits are multiplied last, before some are masked; None
    without such an argument.
    """

    def __init__(self, closed: Any, native: Native = PLAIN):
        super().__init__(closed, native)
        self.settle(self.jaxpr.outvars)
        self.reads = self.needed(self.jaxpr.outvars)[1]
        self.scaled = self._scaled()
        self.scale = None if self.scaled is None else self.jaxpr.invars.index(self.scaled[0])

    def _scaled(self) -> tuple[Any, Any, Any] | None:
        """The argument that multiplies logits last, what it multiplies, and their product; None
        where there is none, or where logits have another sign for a product of another sign.
        """
        v = self.root(self.jaxpr.outvars[0])
        eqn = self.made(v)
        if eqn is not None and eqn.primitive is lax.select_n_p:
            kept = [x for x in eqn.invars[1:] if not self.hidden(x)]
            v = self.root(kept[0]) if len(kept) == 1 else v
            eqn = self.made(v)
        if eqn is None or eqn.primitive is not lax.mul_p:
            return None
        for x, rest in (eqn.invars, eqn.invars[::-1]):
            x = self.root(x)
            if self._is_number(x) and self._is_odd(rest):
                return x, rest, v
        return None

    def _is_number(self, v: Any) -> bool:
        """Whether a value is an argument that is one number."""
        if isinstance(v, Literal) or not any(v is x for x in self.jaxpr.invars[2:]):
            return False
        aval: Any = v.aval
        return aval.size == 1

    def _is_odd(self, v: Any) -> bool:
        """Whether a value has the other sign where the product has."""
        eqn = self.made(self.root(v))
        if eqn is None or eqn.primitive is dot_p:
            return eqn is not None
        if eqn.primitive is lax.tanh_p:
            return self._is_odd(eqn.invars[0])
        if eqn.primitive not in (lax.mul_p, lax.div_p):
            return False
        x, y = eqn.invars
        if self._is_number(self.root(y)):
            return self._is_odd(x)
        return eqn.primitive is lax.mul_p and self._is_number(self.root(x)) and self._is_odd(y)

    def __call__(
        self,
        product: Any,
        read: Callable[[int], Value],
        sizes: dict[str, int],
        apart: bool,
    ) -> list[Any]:
        """The results at each pair.

        **Arguments:**

        - `product`: the product of the queries and keys, `[rows, keys]`.
        - `read`: the value of an argument.
        - `sizes`: the lengths of the axes `"r"` and `"k"`.
        - `apart`: whether the first result comes without its `scale`.
        """
        run = Run(self, lambda _: product, read, sizes)
        logits, *others = self.jaxpr.outvars
        run.apart = self.scaled[1:] if apart and self.scaled is not None else None
        values = [run.times(logits, None, {}), *map(run.value, others)]
        return [x.spread("".join(sizes), sizes) for x in values]
