"""The block function of logits: a product, and what masks and scores do to it pair by pair."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._jax import Literal
from ..._sweep.products import dot_p
from ._operations import Native, PLAIN, Value
from ._program import BlockProgram, Run


LEAST_SCALE = np.float32(2.0**-40)
"""The least scale by which something that is added to logits is divided, see `scale_beside`."""


class PairProgram(BlockProgram):
    """The block function of logits: one product, and what is done to it pair by pair. Arguments 0
    and 1 are the queries and the keys.

    `reads` says of each argument whether the results depend on it other than by the product.
    `scale` is the argument by which logits are multiplied last, before some are masked; None
    without such an argument. A score may add something with a factor that is one number, such as
    the slope of a distance. Then `added` is the sum of that and the product with the scale.
    """

    def __init__(self, closed: Any, native: Native = PLAIN):
        super().__init__(closed, native)
        self.settle(self.jaxpr.outvars)
        self.reads = self.needed(self.jaxpr.outvars)[1]
        self.added: Any = None
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
        if eqn is not None and eqn.primitive in (lax.add_p, lax.sub_p):
            for x, more in (eqn.invars, eqn.invars[::-1]):
                found = self._by_number(self.root(x))
                if found is not None and self._has_number(more):
                    self.added = v
                    return found
        return self._by_number(v)

    def _by_number(self, v: Any) -> tuple[Any, Any, Any] | None:
        """The argument that is one number, its cofactor, and their product `v`; None if `v` is no
        such product.
        """
        eqn = self.made(v)
        if eqn is None or eqn.primitive is not lax.mul_p:
            return None
        for x, rest in (eqn.invars, eqn.invars[::-1]):
            x = self.root(x)
            if self._is_number(x) and self._is_odd(rest):
                return x, rest, v
        return None

    def _has_number(self, v: Any) -> bool:
        """Whether a value is a product with an argument that is one number, and does not depend on
        the logits.
        """
        eqn = self.made(self.root(v))
        if eqn is None or eqn.primitive is not lax.mul_p:
            return False
        if any(x.primitive is dot_p for x in self.needed([v])[0]):
            return False
        return any(self._is_number(self.root(x)) for x in eqn.invars)

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
        read: Callable[..., Value],
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
        if apart and self.scaled is not None and self.scale is not None:
            run.apart = self.scaled[1:]
            if self.added is not None:
                # What is added is divided by the scale, which costs nothing per pair.
                positive, _ = scale_beside(read(self.scale).array, True)
                run.added = self.added, 1 / positive
        values = [run.times(logits, None, {}), *map(run.value, others)]
        return [x.spread("".join(sizes), sizes) for x in values]


def scale_beside(scale: Any, added: bool) -> tuple[Any, Any]:
    """The scale of logits as two factors. The first is positive. The second is between -1 and 1,
    and multiplies the queries.

    **Arguments:**

    - `added`: whether something is added to the scaled logits. The positive factor divides it, and
        it must stay finite.
    """
    least = LEAST_SCALE if added else jnp.finfo(jnp.float32).tiny
    return jnp.maximum(jnp.abs(scale), least), jnp.clip(scale / least, -1, 1)
