"""The text of a mask: a constructor expression, and a small picture of its blocks."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax import lax

from .._jax import CALLS, Literal
from .._misc import is_known, Static


_CELLS = 16  # the picture has at most so many rows, and so many columns of two characters each
_LONGEST = 2**16  # tokens; sizes such as 2**30 say that there is no limit, and are no hint
_MARKS = " \u2591\u2588"  # the characters of empty, partial and full blocks
_SHOWN = 8  # an array with more entries is shown by its dtype and shape


def expression(mask: Any) -> str:
    """The `repr` of a mask: a constructor expression in one line.

    Evaluated, it gives an equal mask, unless it holds long or traced arrays or functions without a
    name. It never raises.
    """
    try:
        return _expression(mask)
    except Exception:  # `eqx.tree_at` and `jax.tree.map` may put any objects in place of leaves
        return f"{type(mask).__name__}(...)"


def drawing(mask: Any, terms: Sequence[Any], block_table: Callable[..., Any]) -> str:
    """The `str` of a mask: its expression, and below it a picture of its blocks.

    It never raises: the picture is left out where it cannot be drawn, as of traced arrays.

    **Arguments:**

    - `terms`, `block_table`: the terms of the mask, and the function that classes its blocks. The
        algebra, which is above this file, gives them.
    """
    try:
        return expression(mask) + _picture(mask, terms, block_table)
    except Exception:  # shapes may not fit each other, and leaves may be any objects
        return expression(mask)


def _expression(x: Any) -> str:
    name = getattr(x, "public_name", type(x).__name__)
    if hasattr(x, "terms"):
        sign = " & " if name == "And" else " | "
        parts = [_expression(t) for t in x.terms]
        nested = [hasattr(t, "terms") for t in x.terms]
        return sign.join(f"({p})" if n else p for p, n in zip(parts, nested))
    if hasattr(x, "term"):
        return (
            f"~({_expression(x.term)})" if hasattr(x.term, "terms") else "~" + _expression(x.term)
        )
    shown = []
    for key, parameter in inspect.signature(type(x)).parameters.items():
        value = getattr(x, key)
        if isinstance(value, int | tuple) and value == parameter.default:
            continue
        if key == "kv_ids" and value is x.q_ids:
            continue
        shown.append(f"{key}={_value(value)}")
    return f"{name}({', '.join(shown)})"


def _value(x: Any) -> str:
    if isinstance(x, tuple):
        return f"({', '.join(map(_value, x))}{',' if len(x) == 1 else ''})"
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        if is_known(x) and np.size(x) <= _SHOWN:
            return str(np.asarray(x).tolist())
        return f"{x.dtype}{list(x.shape)}".replace(" ", "")
    return getattr(x, "__qualname__", None) or (type(x).__name__ if callable(x) else repr(x))


def _picture(mask: Any, terms: Sequence[Any], block_table: Callable[..., Any]) -> str:
    # Arrays say how many heads, queries and keys there are. Where none has such an axis, lengths
    # and sizes of windows that the mask holds are a hint of how many would show its shape.
    if not all(is_known(x) for x in jax.tree.leaves(mask)):
        return ""
    sizes, batch_shape, hint = {"h": 1, "t": 1, "s": 1}, (), 1
    for operand in mask.operands():
        array, axes = operand.array, operand.axes.removesuffix("f")
        shape = array.shape[: array.ndim - len(operand.feature_shape)]
        tail = [a for a in axes if a != "b"]
        batch_shape = np.broadcast_shapes(batch_shape, shape[: len(shape) - len(tail)])
        for a, n in zip(tail, shape[len(shape) - len(tail) :]):
            sizes[a] = max(sizes[a], n)
        if not tail and array.size and array.dtype.kind in "iu":
            hint = max(hint, int(np.max(np.abs(array))))
    depends, tables = _lookups(mask, terms)
    sizes = {a: max(n, tables.get(a, 1)) for a, n in sizes.items()}
    batch_shape = batch_shape or ((tables["b"],) if "b" in tables else ())
    grids = [term.grid.tokens for term in terms if hasattr(term, "grid")]
    if grids and sizes["t"] == sizes["s"] == 1:
        sizes["t"] = sizes["s"] = max(grids)
    hint = max([hint, *_static_ints(mask)])
    plain = min(max(4 * _CELLS, -(-2 * hint // _CELLS) * _CELLS), _LONGEST)
    t = sizes["t"] if sizes["t"] > 1 else sizes["s"] if sizes["s"] > 1 else plain
    s = sizes["s"] if sizes["s"] > 1 else t
    block_q, block_k = -(-t // _CELLS), -(-s // _CELLS)
    table = block_table(mask, t, s, block_q, block_k, batch_shape=batch_shape, heads=sizes["h"])
    if not isinstance(table, np.ndarray) or not table.size:  # the function closes over a tracer
        return ""
    alike = table.shape[:2] == (1, 1) and depends.isdisjoint("bh")
    first = "" if alike else ", first batch element and head"
    lines = ["|" + "".join(_MARKS[c] * 2 for c in row) + "|" for row in table[0, 0]]
    note = f"{t} queries (down) x {s} keys, blocks of {block_q} x {block_k}{first}"
    return "\n".join(["", *lines, note])


def _lookups(mask: Any, terms: Sequence[Any]) -> tuple[frozenset[str], dict[str, int]]:
    """On which axes, of `"b"`, `"h"`, `"t"` and `"s"`, a mask depends, and the sizes of axes of
    arrays that it reads at the index of a batch element or head, or at the position of a query or
    key. They may be arrays that a function closes over, which are no operands.
    """
    if any(term.selects for term in terms):  # a list is no function of a pair
        return frozenset(), {}
    operands = mask.operands()
    scalars = [jax.ShapeDtypeStruct((), np.int32)] * 4
    given = [jax.ShapeDtypeStruct(x.feature_shape, x.array.dtype) for x in operands]
    about = [(frozenset(a), True) for a in "bhts"]
    about += [(frozenset(x.axes.removesuffix("f")), False) for x in operands]
    sizes: dict[str, int] = {}
    (out,) = _followed(jax.make_jaxpr(mask.visible)(*scalars, *given).jaxpr, about, sizes)
    return out[0], sizes


def _followed(jaxpr: Any, about: Any, sizes: dict[str, int]) -> list[tuple[frozenset[str], bool]]:
    """On which axes each result of a jaxpr depends, and whether it is an index up to a shift.

    **Arguments:**

    - `about`: both for each argument.
    - `sizes`: those of arrays that are read at an index. What is read is added.
    """
    env = dict(zip(jaxpr.invars, about))
    of = lambda v: _CONSTANT if isinstance(v, Literal) else env.get(v, _CONSTANT)
    for eqn in jaxpr.eqns:
        xs = [of(v) for v in eqn.invars]
        if eqn.primitive in CALLS:
            inner = eqn.params[CALLS[eqn.primitive]].jaxpr
            env.update(zip(eqn.outvars, _followed(inner, xs, sizes)))
            continue
        places = []
        if eqn.primitive is lax.dynamic_slice_p:
            places = list(enumerate(xs[1:]))
        elif eqn.primitive is lax.gather_p:
            places = [(axis, xs[1]) for axis in eqn.params["dimension_numbers"].start_index_map]
        for axis, (axes, is_index) in places:
            if is_index and len(axes) == 1:
                (name,) = axes
                sizes[name] = max(sizes.get(name, 1), eqn.invars[0].aval.shape[axis])
        axes = frozenset().union(*(x[0] for x in xs))
        is_index = eqn.primitive in _SHIFTS and all(x[1] or not x[0] for x in xs[-2:])
        env.update(dict.fromkeys(eqn.outvars, (axes, is_index)))
    return [of(v) for v in jaxpr.outvars]


_CONSTANT = frozenset(), False

# An index that counts from the end if it is negative, as that of `array[i]`, goes through these.
_SHIFTS = {
    lax.add_p,
    lax.broadcast_in_dim_p,
    lax.clamp_p,
    lax.convert_element_type_p,
    lax.max_p,
    lax.min_p,
    lax.reshape_p,
    lax.select_n_p,
    lax.squeeze_p,
    lax.sub_p,
}


def _static_ints(x: Any) -> list[int]:
    """The magnitudes of the static ints that a mask holds, which the picture should show."""
    if isinstance(x, Static):
        x = x.value
    if isinstance(x, int) and not isinstance(x, bool):
        return [abs(x)]
    if isinstance(x, tuple):
        return [n for y in x for n in _static_ints(y)]
    if isinstance(x, eqx.Module):
        return [n for y in vars(x).values() for n in _static_ints(y)]
    return []
