"""Block functions as a warpgroup evaluates them: pair by pair, in registers.

A block function is written for blocks `[keys, rows]`. It begins with products of matrices, which
give a number for each pair. Operations of one pair each follow, and in sums further products. A
warpgroup may hold the transposed block: in the fold, one row of the softmax lies in the same four
threads.

Operations between the products are of one pair, so neither the orientation nor the shapes in the
function matter. All that counts of a value is what it varies with, its *kind*. It is `"rk"` for
rows and keys, or `"kr"` where a warpgroup holds the transposed block. It is `"r"` for rows, `"k"`
for keys, and `""` for neither. Where two kinds meet, values are repeated.

The block function of logits: a product, and what masks and scores do to it pair by pair.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._jax import Literal
from ..._sweep.differences import cut_diagonals_p
from ..._sweep.products import dot_p
from .._program import flat_jaxpr, LOG2E, origin_in
from ._operations import (
    evaluated,
    in_range,
    is_known,
    is_same,
    joined,
    Native,
    PLAIN,
    tanh_of,
    Value,
)


_COMPARISONS = lax.le_p, lax.lt_p, lax.ge_p, lax.gt_p


class BlockProgram:
    """A block function, evaluated where a result needs it.

    **Arguments:**

    - `closed`: its jaxpr.
    - `native`: the operations that the compiler has itself.

    `settled` maps the result of a selection to its only case that counts, if there is just one.
    """

    def __init__(self, closed: Any, native: Native = PLAIN):
        flat, self.native = flat_jaxpr(closed), native
        self.jaxpr, self.consts = flat.jaxpr, flat.consts
        self.made_by = {v: eqn for eqn in self.jaxpr.eqns for v in eqn.outvars}
        self.settled: dict[Any, Any] = {}
        self.conjunctions = self._conjunctions()

    def prune_selects(self, results: Sequence[Any]) -> None:
        """Finds selections of which only one case counts in some results.

        In `select(p, f(select(p, x, y)), 0)` only `x` counts, as where `p` picks `y` the outer
        selection drops what `f` made of it. The derivative of a score has this form: at masked
        pairs it gets the arguments `y` of a visible pair (see `_problem/closed_score.py`).
        """
        # Facts are pairs of a predicate and the case that it picks. `known[v]` are the facts that
        # hold wherever `v` counts. Going backwards, all uses of a value come before its operation.
        known = {v: frozenset() for v in results if not isinstance(v, Literal)}

        def reads(v, facts):
            if not isinstance(v, Literal):
                known[v] = known.get(v, facts) & facts

        for eqn in reversed(self.jaxpr.eqns):
            facts = [known[v] for v in eqn.outvars if v in known]
            if not facts or eqn.primitive is dot_p:
                continue
            if eqn.primitive is not lax.select_n_p:
                # Numbers of a pair depend on those of the same pair, for which facts hold too.
                for v in eqn.invars:
                    reads(v, facts[0] if is_known(eqn) else frozenset())
                continue
            (facts,), (which, *cases) = facts, eqn.invars
            at, roots = self.root(which), [self.root(x) for x in cases]
            case = next((i for v, i in facts if v is at), None)
            # A predicate that is a literal picks the same case everywhere, and no fact names it.
            case = int(at.val) if isinstance(at, Literal) else case
            case = 0 if all(x is roots[0] for x in roots) else case
            if case is not None:
                self.settled[eqn.outvars[0]] = cases[case]
                reads(cases[case], facts)
                continue
            reads(which, facts)
            # Case i is read only where the predicate picks it.
            for i, x in enumerate(cases):
                reads(x, facts | {(at, i)})

    def _conjunctions(self) -> set[Any]:
        """Finds predicates that two others make by `and`, and that only select floats, as masks do.
        `Native.both` joins such a pair. Two comparisons of the same value with known numbers are
        left out, as the compiler makes one comparison of them.
        """
        # The use None stands for a result of the function.
        uses, found = {v: [None] for v in self.jaxpr.outvars if not isinstance(v, Literal)}, set()
        for eqn in self.jaxpr.eqns:
            for v in (v for v in eqn.invars if not isinstance(v, Literal)):
                uses.setdefault(v, []).append(eqn)

        def selects(use):
            if use is None or use.primitive is not lax.select_n_p:
                return use is not None and use.outvars[0] in found
            return jnp.issubdtype(use.outvars[0].aval.dtype, jnp.floating)

        for eqn in reversed(self.jaxpr.eqns):
            (v, *_), is_and = eqn.outvars, eqn.primitive is lax.and_p
            if is_and and v.aval.dtype == jnp.bool_ and all(map(selects, uses.get(v, []))):
                x, y = map(self._compared, eqn.invars)
                known = any(isinstance(x, Literal) for x in eqn.invars)
                found |= set() if known or (x is not None and x is y) else {v}
        return found

    def _compared(self, v: Any) -> Any:
        """The value that a predicate compares with a known one; None for any other predicate."""
        eqn = self.made(v)
        unknown = [x for x in (() if eqn is None else eqn.invars) if not isinstance(x, Literal)]
        if eqn is None or len(unknown) != 1:
            return None
        if eqn.primitive is lax.and_p:
            return self._compared(unknown[0])
        return self.root(unknown[0]) if eqn.primitive in _COMPARISONS else None

    def needed(self, results: Sequence[Any]) -> tuple[list[Any], list[bool]]:
        """The operations that some values depend on, back to the products, in the order of the
        function; and for each argument whether the values depend on it.
        """
        needed, eqns = {v for v in results if not isinstance(v, Literal)}, []
        for eqn in reversed(self.jaxpr.eqns):
            if needed & set(eqn.outvars):
                eqns.insert(0, eqn)
                case = self.settled.get(eqn.outvars[0])
                if eqn.primitive is not dot_p:
                    reads = eqn.invars if case is None else [case]
                    needed |= {v for v in reads if not isinstance(v, Literal)}
        return eqns, [v in needed for v in self.jaxpr.invars]

    def made(self, v: Any) -> Any:
        """The operation that makes a value, or None."""
        v = self.counting(v)
        return None if isinstance(v, Literal) else self.made_by.get(v)

    def counting(self, v: Any) -> Any:
        """The value that counts in place of a settled selection."""
        while not isinstance(v, Literal) and v in self.settled:
            v = self.settled[v]
        return v

    def root(self, v: Any) -> Any:
        """What a value was before its shape was changed."""
        while (eqn := self.made(v)) is not None and is_same(eqn):
            v = eqn.invars[0]
        return self.counting(v)

    def hidden(self, v: Any) -> bool:
        """Whether a value is the logit of a masked pair."""
        v = self.root(v)
        return isinstance(v, Literal) and bool(v.val == -np.inf)

    def choice(self, v: Any) -> tuple[Any, int] | None:
        """The predicate that masks a logit, and the case in which it does not; or None."""
        eqn = self.made(v)
        if eqn is None or eqn.primitive is not lax.select_n_p:
            return None
        hidden = [self.hidden(x) for x in eqn.invars[1:]]
        return (eqn.invars[0], hidden.index(False)) if sorted(hidden) == [False, True] else None


class Run:
    """One evaluation of a program.

    **Arguments:**

    - `product`: a function that returns the result of a product, `[own, other]`.
    - `read`: a function that returns the value of an argument. If its numbers are cut along
        diagonals, it is also given the further arguments of `cut_diagonals`.
    - `sizes`: the length of each axis of a tile by its letter in kinds, in the order of the axes.
    - `origin`: the argument that is subtracted in exponents, if `read` gives it in units of
        `log 2`, that is, times `log2(e)`.
    """

    def __init__(
        self,
        program: BlockProgram,
        product: Callable[[Any], Any],
        read: Callable[..., Value],
        sizes: dict[str, int],
        origin: int | None = None,
    ):
        self.program, self.product, self.sizes = program, product, sizes
        self.arguments = {v: i for i, v in enumerate(program.jaxpr.invars)}
        self.read, self.root, self.origin, self.native = read, program.root, origin, program.native
        # If this is `(x, y)` with `y = scale x`, then `x` is given where `y` is asked for; see
        # `PairProgram`.
        self.apart: tuple[Any, Any] | None = None
        # If this is `(z, f)`, then `z` is a sum of `y` and something else. It is given times `f`,
        # so that the latter is multiplied by `f`.
        self.added: tuple[Any, Any] | None = None
        self.exponentials: dict[Any, Value] = {}
        consts = zip(program.jaxpr.constvars, program.consts)
        self.done: dict[Any, Value] = {v: Value("", c) for v, c in consts}

    def value(self, v: Any) -> Value:
        v = self.program.counting(v)
        if isinstance(v, Literal):
            return Value("", v.val)
        if v not in self.done:
            self.done[v] = self._value(v)
        return self.done[v]

    def _value(self, v: Any) -> Value:
        if v in self.arguments:
            return self.read(self.arguments[v])
        eqn = self.program.made_by[v]
        if eqn.primitive is dot_p:
            return Value("".join(self.sizes), self.product(eqn))
        if eqn.primitive is cut_diagonals_p:
            x, *at = eqn.invars
            return self.read(self.arguments[self.root(x)], tuple(self.value(i).array for i in at))
        if eqn.primitive is lax.exp_p:
            return self._exponential(eqn.invars[0], {})
        if eqn.primitive is lax.tanh_p and "tanh" not in self.native.names:
            # `tanh_of` takes exp(2 x), which is 2^(2 x log2(e)).
            x = self.times(eqn.invars[0], 2 * LOG2E, {})
            return Value(x.kind, tanh_of(self.native.exp2(x.array), self.native.inverse))
        if eqn.primitive.name == "add_any":
            return self._sum(eqn, {})
        if (x := self._converted_distance(eqn)) is not None:
            return x
        if v in self.program.conjunctions:
            xs = [self.value(x) for x in eqn.invars]
            both = self.native.both if len(joined(xs, self.sizes)) == 2 else lax.bitwise_and
            return self._apply(both, *xs)
        return evaluated(eqn, [self.value(x) for x in eqn.invars], self.sizes, self.native)

    def _converted_distance(self, eqn: Any) -> Value | None:
        """Computes `float(abs(i))` as `abs(float(i))`; None for anything else. An instruction on
        floats takes the absolute value of its operand for free.
        """
        if eqn.primitive is not lax.convert_element_type_p:
            return None
        inner, new = self.program.made(eqn.invars[0]), eqn.params["new_dtype"]
        if inner is None or inner.primitive is not lax.abs_p or new != jnp.float32:
            return None
        x = evaluated(eqn, [self.value(inner.invars[0])], self.sizes, self.native)
        return Value(x.kind, jnp.abs(x.array))

    def _exponential(self, v: Any, given: dict[Any, int]) -> Value:
        """The exponential of `v`, the argument of an `exp`.

        In `exp(select(mask, s, -inf) - origin)`, a masked logit gives 0, also where the origin of
        its row is NaN. So the mask may as well select last: `select(mask, exp(s - origin), 0)`.
        Then scale, factor and origin meet in one multiply-add per pair. If the mask is `given`, a
        later selection by it drops what is masked, and none is needed here.
        """
        eqn = self.program.made(v)
        choice = None
        if eqn is not None and eqn.primitive is lax.sub_p and self._is_origin(eqn.invars[1]):
            choice = self.program.choice(eqn.invars[0])
        which, case = choice or (None, 0)
        if v not in self.exponentials:
            x = self.times(v, LOG2E, {} if choice is None else {which: case})
            self.exponentials[v] = Value(x.kind, self.native.exp2(x.array))
        y = self.exponentials[v]
        if choice is None or given.get(which) == case:
            return y
        cases = (y, _ZERO) if case == 0 else (_ZERO, y)
        return self._apply(lambda *xs: lax.select_n(*xs), self.value(which), *cases)

    def _apply(self, f: Callable, *xs: Value) -> Value:
        kind = joined(xs, self.sizes)
        return Value(kind, f(*[x.spread(kind, self.sizes) for x in xs]))

    def _sum(self, eqn: Any, given: dict[Any, int]) -> Value:
        """The sum of two cotangents. A common factor is applied once: `f x + f y = f (x + y)`."""
        terms = self._with_factor(eqn)
        both = [self.times(v, None, given) for v in (terms or (None, *eqn.invars))[1:]]
        total = self._apply(jnp.add, *both)
        if terms is None:
            return total
        return self._apply(jnp.multiply, self.times(terms[0], None, given), total)

    def _with_factor(self, eqn: Any) -> tuple | None:
        """The common factor of a sum of two products, and the other two; None if there is none."""
        made = [self.program.made(v) for v in eqn.invars]
        products = [p.invars for p in made if p is not None and p.primitive is lax.mul_p]
        if len(products) < 2:
            return None
        (a, b), (c, d) = products
        for x, y, u, w in ((a, b, c, d), (a, b, d, c), (b, a, c, d), (b, a, d, c)):
            if x is u:
                return x, y, w
        return None

    def _is_origin(self, v: Any) -> bool:
        """Whether a value is the finite origin of exponents."""
        eqn = self.program.made(self.root(v))
        found = origin_of(eqn, self.root, self.arguments)
        return found is not None and found == self.origin

    def _is_scaled(self, v: Any) -> bool:
        """Whether a value is `c x` with one number `c`, which can take a further factor in."""
        eqn = self.program.made(v)
        if eqn is not None and is_same(eqn):
            return self._is_scaled(eqn.invars[0])
        if eqn is None or eqn.primitive is not lax.mul_p:
            return False
        return any(not self.value(x).kind for x in eqn.invars)

    def _beside(self, eqn: Any, factor: Any, given: dict[Any, int]) -> Value:
        """The sum of scaled logits and something else, without the scale and times a factor."""
        assert self.added is not None and self.apart is not None
        other = self.added[1] if factor is None else self.added[1] * factor
        scaled = [self.root(x) is self.apart[1] for x in eqn.invars]
        xs = [self.times(x, factor if y else other, given) for x, y in zip(eqn.invars, scaled)]
        return evaluated(eqn, xs, self.sizes, self.native)

    def times(self, v: Any, factor: Any, given: dict[Any, int]) -> Value:  # noqa: C901 (one branch for each operation)
        """A value times a factor, which meets other factors where it costs no product per pair.

        **Arguments:**

        - `factor`: a number, known or not; None is 1.
        - `given`: the cases that predicates select wherever the result counts.
        """
        # Below, f is the factor and c a number that is the same at all pairs.
        v = self.program.counting(v)
        eqn = self.program.made(v)
        if isinstance(v, Literal):
            return Value("", v.val if factor is None else in_range(v.val, factor))
        if eqn is not None and eqn.primitive is lax.select_n_p:
            which, *cases = eqn.invars
            if which in given:
                return self.times(cases[given[which]], factor, given)
            # f select(p, a, b) = select(p, f a, f b), and p is known within each case.
            xs = [self.times(x, factor, {**given, which: i}) for i, x in enumerate(cases)]
            return evaluated(eqn, [self.value(which), *xs], self.sizes, self.native)
        if eqn is not None and is_same(eqn):
            return self.times(eqn.invars[0], factor, given)
        if self.added is not None and v is self.added[0]:
            return self._beside(eqn, factor, given)
        if self.apart is not None and v is self.apart[1]:
            return self.times(self.apart[0], factor, given)
        if eqn is not None and eqn.primitive is lax.mul_p:
            # f (c x) = (f c) x: the numbers are multiplied first, so that a pair has one product.
            small, large = sorted(eqn.invars, key=lambda x: len(self.value(x).kind))
            if not self.value(small).kind and self._is_scaled(large):
                return self.times(large, self.times(small, factor, given).array, given)
            if not self.value(small).kind or (factor is None and given):
                xs = [self.times(small, factor, given), self.times(large, None, given)]
                return evaluated(eqn, xs, self.sizes, self.native)
        if eqn is not None and eqn.primitive is lax.div_p and factor is not None:
            x, y = eqn.invars
            if not self.value(y).kind:
                # f (x / c) = (f / c) x takes one product, and no division per pair.
                both = Value("", factor / self.value(y).array)
                if self._is_scaled(x):
                    return self.times(x, both.array, given)
                return self._apply(jnp.multiply, self.times(x, None, given), both)
        if eqn is not None and eqn.primitive is lax.sub_p and self._is_origin(eqn.invars[1]):
            # f (x - m) = f x - f m, where f is log2(e), and `read` gives f m.
            assert self.origin is not None
            x = self.times(eqn.invars[0], factor, given)
            return self._apply(jnp.subtract, x, self.read(self.origin))
        if eqn is not None and factor is not None and eqn.primitive in (lax.add_p, lax.sub_p):
            # f (c x + d y) = (f c) x + (f d) y takes no further product.
            if all(self._is_scaled(x) for x in eqn.invars):
                xs = [self.times(x, factor, given) for x in eqn.invars]
                return evaluated(eqn, xs, self.sizes, self.native)
        if eqn is not None and factor is None and given and eqn.primitive is lax.exp_p:
            return self._exponential(eqn.invars[0], given)
        if eqn is not None and factor is None and given and eqn.primitive.name == "add_any":
            return self._sum(eqn, given)
        # f max(x, y) = max(f x, f y) where f is positive, as known factors of `exp` and `tanh` are.
        positive = isinstance(factor, float | np.floating) and factor > 0
        if eqn is not None and eqn.primitive is lax.max_p and positive:
            return self._apply(jnp.maximum, *(self.times(x, factor, given) for x in eqn.invars))
        x = self.value(v)
        factor = np.float32(factor) if isinstance(factor, float) else factor
        return x if factor is None else Value(x.kind, x.array * factor)


_ZERO = Value("", np.float32(0))


def origin_of(eqn: Any, root: Callable, arguments: dict[Any, int]) -> int | None:
    """The argument of which an operation makes the finite origin of exponents, or None."""
    v = origin_in(eqn)
    return None if v is None else arguments.get(root(v))


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
        self.prune_selects(self.jaxpr.outvars)
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
