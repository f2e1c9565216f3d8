"""The error bound: a first-order running error analysis of the formulas in `oracle.py`.

There is no tolerance. A `Bounded` array carries `value` (the float64 or longdouble reference) and
`error`, a bound on how far a correct implementation may be from it when it accumulates with unit
roundoff `u` (2^-24 for float32, 2^-53 for float64) and may round the *computed* operands of a
matrix product to the input dtype (`u_op`: 2^-8 for bfloat16, 2^-11 for float16, else u). Inputs are
exact. The rules, first order in u, each from fl(x op y) = (x op y)(1 + d), |d| <= u:

    x + y      E_x + E_y + u |x + y|
    x y        |x| E_y + |y| E_x + u |x y|
    x / y      (E_x + |x/y| E_y) / |y| + u |x/y|
    exp x      e^x (E_x + 3u)
    log x      E_x / |x| + 3u |log x|
    tanh x     (1 - t^2) E_x + 7u |t|          (3 and 7 are what XLA's functions measure, in u)
    a . b      sum |a| E_b + |b| E_a + f(n) u |a||b|, and u_op |a||b| for each computed operand
    sum a      sum E_a + f(n) u |a|
    output     E_x + u_out |x|

over n terms, with `f(n) = 2 + sqrt(n)`: the probabilistic growth of a length-n accumulation (Higham
and Mary, SIAM J. Sci. Comput. 2019; the worst case is n), with 2 roundings to spare. Underflow adds
the smallest normal number.

What that gives, in closed form, with `A_ij = scale sum_d |q||k|`:

    E_z   = u ((3 + sqrt D) A_ij + |z| + |z - m| + [cap: 7 |c|, bias, ...])       of a logit
    E_p   = p_ij (E_z_ij + sum_l p_il E_z_il + u (f(S) + 7))                      softmax Jacobian
    E_out = sum_j E_p |v_j| + (f(S) u + u_op) sum_j p |v_j|
    E_lse = sum_j p E_z + u (f(S) + 3) + u |lse|  (+ u_op where a product adds up the probabilities)
    E_dp  = u f(V) |g_i|.|v_j|  (+ u_op |g_i|.|v_j| where a product reads g / l, as on a TPU)
    E_del = sum_j (E_p |dp| + p E_dp) + (f(S) u + 2 u_op) sum_j p |dp|       delta = sum_j p dp
    E_dz  = E_p |dp - delta + l| + p (E_dp + E_del + u |dp - delta + l|)
    E_dv  = sum_i E_p |g_i| + (f(GT) u + u_op) sum_i p |g_i|
    E_dq  = scale (sum_j E_dz |k_j| + (f(S) u + u_op) sum_j |dz| |k_j|)           dk: over rows, q
    E_dbias  = sum E_dz + f(n) u sum |dz|                  over the n pairs that share an entry
    E_dscale = sum E_dz |x| + |dz| E_x + f(n) u |dz x|     cap, slopes and table alike
    E_dsinks = sum_i p_in (E_del + (E_p / p) |l - delta| + f(n) u |l - delta|)

With kappa_i = sum_j p_ij A_ij, E_out is about u f(D) (1 + kappa_i) sum_j p |v_j|, the bound the
design asks for, which multiplies two averages over j where this one averages the products.
Tangents obey the same rules on the forward-mode formulas. Hessian-vector products are the gradient
formulas run on `Dual` numbers whose parts are `Bounded`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from . import oracle


@dataclasses.dataclass(frozen=True)
class Precision:
    u: float  # accumulation
    u_operand: float  # computed operands of a product
    tiny: float  # absolute error of an underflow while accumulating
    tiny_operand: float
    reference: Any  # dtype in which the reference is computed
    normalised: bool = False  # cotangents of the output are divided by denominators first
    by_product: bool = False  # denominators are a product too, of computed probabilities and ones
    carried: bool = False  # sinks are added to a Carry, whose numerator is rounded without them


def _roundoff(dtype) -> float:
    return float(ml_dtypes.finfo(dtype).eps) / 2


def _underflow(dtype) -> float:
    """float16 keeps its subnormals; the others may be flushed to zero."""
    info = ml_dtypes.finfo(dtype)
    return (
        float(info.smallest_subnormal) / 2 if dtype == np.float16 else float(info.smallest_normal)
    )


def precision_of(dtype, **how: bool) -> Precision:
    """`how` are the last fields of `Precision`."""
    dtype = np.dtype(dtype)
    work = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    reference = np.dtype(np.longdouble if dtype == np.float64 else np.float64)
    own = float(np.finfo(reference).eps) / 2  # the reference is rounded too
    return Precision(
        u=_roundoff(work) + own,
        u_operand=_roundoff(dtype) + own,
        tiny=_underflow(work),
        tiny_operand=_underflow(dtype),
        reference=reference,
        **how,
    )


def growth(n: int) -> float:
    return 2 + math.sqrt(n)


class _Wrapped(NDArrayOperatorsMixin):
    """NumPy's two override protocols, routed to `_ufuncs` and `_functions`."""

    __array_priority__ = 1000

    def __array_ufunc__(self, ufunc, method, *args, **kwargs):
        rule = getattr(self, f"_{ufunc.__name__}", None)
        if method != "__call__" or kwargs or rule is None or self._yields(args):
            return NotImplemented
        return rule(*args)

    def __array_function__(self, function, types, args, kwargs):
        if function is np.shape:
            return np.shape(oracle.plain(self))
        if self._yields(args):
            return NotImplemented
        return getattr(self, f"_{function.__name__}")(*args, **kwargs)

    def _yields(self, args) -> bool:
        """A dual with `Bounded` parts handles a `Bounded`; not the other way round."""
        return not isinstance(self, Dual) and any(isinstance(x, Dual) for x in args)

    @property
    def ndim(self):
        return oracle.plain(self).ndim


class Bounded(_Wrapped):
    """A value and a bound on the error of computing it."""

    def __init__(self, value, error, precision: Precision, computed: bool = True):
        self.primal = np.asarray(value)
        self.error = error
        self.precision = precision
        self.computed = computed

    @classmethod
    def exact(cls, value, precision: Precision) -> Bounded:
        value = np.asarray(value).astype(precision.reference)
        return cls(value, np.zeros_like(value), precision, computed=False)

    def rounded(self, dtype) -> Bounded:
        """Once rounded to `dtype`."""
        return self._new(
            self.primal, self.error + _roundoff(dtype) * abs(self.primal) + _underflow(dtype)
        )

    def __getitem__(self, index):
        return self._like(self.primal[index], self.error[index])

    def _like(self, value, error):
        return Bounded(value, error, self.precision, self.computed)

    def _new(self, value, error):
        return Bounded(value, error, self.precision)

    def _add(self, a, b):
        (a, ea), (b, eb) = _split(a), _split(b)
        value = a + b
        return self._new(value, ea + eb + self.precision.u * abs(value))

    def _subtract(self, a, b):
        (a, ea), (b, eb) = _split(a), _split(b)
        value = a - b
        return self._new(value, ea + eb + self.precision.u * abs(value))

    def _multiply(self, a, b):
        (a, ea), (b, eb) = _split(a), _split(b)
        value = a * b
        rounding = self.precision.u * abs(value) + self.precision.tiny
        return self._new(value, abs(a) * eb + abs(b) * ea + rounding)

    def _divide(self, a, b):
        (a, ea), (b, eb) = _split(a), _split(b)
        value = a / b
        rounding = self.precision.u * abs(value) + self.precision.tiny
        return self._new(value, (ea + abs(value) * eb) / abs(b) + rounding)

    def _negative(self, a):
        return a._like(-a.primal, a.error)

    def _exp(self, a):
        value = np.exp(a.primal)
        return self._new(value, value * (a.error + 3 * self.precision.u) + self.precision.tiny)

    def _log(self, a):
        value = np.log(a.primal)
        return self._new(value, a.error / abs(a.primal) + 3 * self.precision.u * abs(value))

    def _tanh(self, a):
        value = np.tanh(a.primal)
        return self._new(value, (1 - value**2) * a.error + 7 * self.precision.u * abs(value))

    def _reshape(self, a, shape):
        return a._like(np.reshape(a.primal, shape), np.reshape(a.error, shape))

    def _where(self, condition, a, b):
        computed = any(getattr(x, "computed", False) for x in (a, b))
        (a, ea), (b, eb) = _split(a), _split(b)
        value, error = np.where(condition, a, b), np.where(condition, ea, eb)
        return Bounded(value, error, self.precision, computed)

    def _sum(self, a, axis=None):
        value = np.sum(a.primal, axis=axis)
        n = a.primal.size // max(value.size, 1)
        error = np.sum(a.error, axis=axis) + growth(n) * self.precision.u * np.sum(
            abs(a.primal), axis=axis
        )
        return self._new(value, error)

    def _einsum(self, subscripts, *operands):
        if len(operands) == 1:
            (a,) = operands
            return a._like(np.einsum(subscripts, a.primal), np.einsum(subscripts, a.error))
        computed = [getattr(x, "computed", False) for x in operands]
        (a, ea), (b, eb) = (_split(x) for x in operands)
        inputs, output = subscripts.split("->")
        sizes = {}
        for labels, x in zip(inputs.split(","), (a, b), strict=True):
            sizes.update(zip(labels, np.shape(x), strict=True))
        n = math.prod(size for label, size in sizes.items() if label not in output)
        p = self.precision

        def dot(x, y):
            if (
                n == 0
            ):  # in longdouble, np.einsum can leave the sum of nothing uninitialised (NumPy 2.4)
                return np.zeros([sizes[label] for label in output], p.reference)
            return np.einsum(
                subscripts, np.broadcast_to(x, np.shape(a)), np.broadcast_to(y, np.shape(b))
            )

        size_a, size_b = abs(a), abs(b)
        error = (
            dot(ea, size_b) + dot(size_a, eb) + growth(n) * p.u * dot(size_a, size_b) + n * p.tiny
        )
        if computed[0]:
            error = error + dot(p.u_operand * size_a + p.tiny_operand, size_b)
        if computed[1]:
            error = error + dot(size_a, p.u_operand * size_b + p.tiny_operand)
        return self._new(dot(a, b), error)


def _split(x):
    return (x.primal, x.error) if isinstance(x, Bounded) else (np.asarray(x), np.zeros(()))


class Dual(_Wrapped):
    """`primal + tangent eps`, to differentiate the gradient formulas. Parts may be `Bounded`."""

    def __init__(self, primal, tangent):
        self.primal = primal
        self.tangent = tangent

    def __getitem__(self, index):
        return Dual(self.primal[index], self.tangent[index])

    def _add(self, a, b):
        (a, da), (b, db) = _parts(a), _parts(b)
        return Dual(a + b, da + db)

    def _subtract(self, a, b):
        (a, da), (b, db) = _parts(a), _parts(b)
        return Dual(a - b, da - db)

    def _multiply(self, a, b):
        (a, da), (b, db) = _parts(a), _parts(b)
        return Dual(a * b, da * b + a * db)

    def _divide(self, a, b):
        (a, da), (b, db) = _parts(a), _parts(b)
        return Dual(a / b, (da - a / b * db) / b)

    def _negative(self, a):
        return Dual(-a.primal, -a.tangent)

    def _exp(self, a):
        value = np.exp(a.primal)
        return Dual(value, value * a.tangent)

    def _log(self, a):
        return Dual(np.log(a.primal), a.tangent / a.primal)

    def _tanh(self, a):
        value = np.tanh(a.primal)
        return Dual(value, (1.0 - value * value) * a.tangent)

    def _reshape(self, a, shape):
        return Dual(np.reshape(a.primal, shape), np.reshape(a.tangent, shape))

    def _where(self, condition, a, b):
        (a, da), (b, db) = _parts(a), _parts(b)
        return Dual(np.where(condition, a, b), np.where(condition, da, db))

    def _sum(self, a, axis=None):
        return Dual(np.sum(a.primal, axis=axis), np.sum(a.tangent, axis=axis))

    def _einsum(self, subscripts, *operands):
        if len(operands) == 1:
            (a,) = operands
            return Dual(np.einsum(subscripts, a.primal), np.einsum(subscripts, a.tangent))
        a, b = operands
        if not isinstance(b, Dual):
            return Dual(np.einsum(subscripts, a.primal, b), np.einsum(subscripts, a.tangent, b))
        if not isinstance(a, Dual):
            return Dual(np.einsum(subscripts, a, b.primal), np.einsum(subscripts, a, b.tangent))
        left = np.einsum(subscripts, a.tangent, b.primal)
        right = np.einsum(subscripts, a.primal, b.tangent)
        return Dual(np.einsum(subscripts, a.primal, b.primal), left + right)


def _parts(x):
    return (x.primal, x.tangent) if isinstance(x, Dual) else (x, 0.0)


# --- the bounded references ---


def bounded(problem: oracle.Problem, precision: Precision) -> oracle.Problem:
    """The problem with every differentiable argument an exact `Bounded`; the scale is a rounded
    constant.
    """
    arguments = {n: Bounded.exact(x, precision) for n, x in problem.arguments().items()}
    arguments["scale"].error = precision.u * abs(arguments["scale"].primal)
    return problem.replace(**arguments)


def values(problem, precision) -> dict[str, Bounded]:
    f = oracle.forward(bounded(problem, precision))
    lse = f.lse
    if precision.by_product:
        lse = Bounded(lse.primal, lse.error + precision.u_operand, precision)
    return {"out": f.out, "lse": lse, "top": _largest(f, precision)}


def _largest(f: oracle.Forward, precision) -> Bounded:
    """The largest logit of each row, without sinks. A maximum moves at most as far as the one of
    its terms that moves most.
    """
    value = np.where(f.visible, f.z.primal, -np.inf).max(-1, initial=-np.inf)
    error = np.where(f.visible, f.z.error, 0).max(-1, initial=0)
    return Bounded(value.transpose(0, 2, 1), error.transpose(0, 2, 1), precision)


def cotangents(ct_out, ct_lse, precision) -> list[Bounded]:
    """What multiplies the values is exact, unless it is the cotangent of the Carry's numerator."""
    out = Bounded(ct_out, np.zeros_like(ct_out), precision, computed=precision.normalised)
    return [out, Bounded.exact(ct_lse, precision)]


def grads(problem, ct_out, ct_lse, precision) -> dict[str, Bounded]:
    cts = cotangents(ct_out, ct_lse, precision)
    return oracle.vjp(bounded(problem, precision), *cts)


def tangents(problem, directions, precision) -> dict[str, Bounded]:
    moved = {n: Bounded.exact(t, precision) for n, t in directions.items()}
    found = oracle.jvp(bounded(problem, precision), moved)
    if precision.carried and problem.sinks is not None:
        # With the mean m of dz over the keys, the tangent of the output is
        #     sum_j w_j (dz_j - m) v_j + (m - dlse) sum_j w_j v_j.
        # The second sum is the output, of which the Carry holds what it was rounded to.
        of_keys = {n: t for n, t in directions.items() if n != "sinks"}
        mean = oracle.jvp(problem.replace(sinks=None), of_keys)["lse"]
        size = oracle.forward(problem.replace(v=abs(problem.v))).out
        far = abs(mean - found["lse"].primal)
        found["out"].error = found["out"].error + precision.u_operand * far[..., None] * size
    return found


def hvps(problem, ct_out, ct_lse, directions, precision) -> dict[str, Bounded]:
    exact = bounded(problem, precision)
    moved = {
        n: Dual(x, Bounded.exact(directions[n], precision))
        for n, x in exact.arguments().items()
        if n in directions
    }
    cts = cotangents(ct_out, ct_lse, precision)
    return {n: g.tangent for n, g in oracle.vjp(exact.replace(**moved), *cts).items()}


def excess(actual, reference: Bounded) -> float:
    """The largest `|actual - value| / bound` over the components; at most 1 if correct. NaN and a
    wrong -inf are inf.
    """
    actual = np.asarray(actual)
    dtype = actual.dtype
    value, error = reference.primal, reference.error
    if actual.shape != value.shape:
        raise AssertionError(f"shape {actual.shape}, expected {value.shape}")
    if actual.size == 0:
        return 0.0
    actual = actual.astype(value.dtype)
    infinite = np.isinf(value)
    wrong = np.where(infinite, actual != value, ~np.isfinite(actual))
    if wrong.any():
        return math.inf
    finite = np.where(infinite, 0, value)
    limit = error + _roundoff(dtype) * abs(finite) + _underflow(dtype)
    # A bound beyond float range judges nothing, and a case that has one is a bad case.
    assert np.isfinite(limit).all(), "the bound itself overflowed"
    return float(np.max(abs(np.where(infinite, 0, actual - finite)) / limit))


def check(problem: oracle.Problem, out, lse=None) -> None:
    """Fails where an output, or a logsumexp, is not within the bound of the problem, whose leading axes
    are one.
    """
    want = values(problem, precision_of(np.asarray(out).dtype))
    for name, x in (("out", out), ("lse", lse)):
        if x is not None:
            ratio = excess(np.reshape(x, np.shape(want[name].primal)), want[name])
            assert ratio <= 1, f"error / bound of {name}: {ratio}"
