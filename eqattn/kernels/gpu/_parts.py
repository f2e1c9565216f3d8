"""Finds out from block functions what the blocks of a cache are made of.

A block of keys or values is one or several *pieces* along its tokens, as many as it has pages. A
piece has one or several *parts* along its features. Keys that are latents have two: the latent, and
the rotary part beside it. A part is an array `[tokens, heads, n]`, perhaps with a scale for each
vector.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax import lax

from ..._jax import Literal
from ..._sweep.products import grouped_dot_p
from .._program import flat_jaxpr


_SAME = {
    lax.broadcast_in_dim_p,
    lax.convert_element_type_p,
    lax.reshape_p,
    lax.squeeze_p,
    lax.copy_p,
}


@dataclasses.dataclass(frozen=True)
class Part:
    """Some features of some tokens. `array` is the index of the argument of a block function that
    holds them. `scales` is that of their scales `[1, tokens * heads]`, or None.
    """

    array: int
    scales: int | None = None

    def among(self, arguments: Sequence[int]) -> "Part":
        """The same part, where the arguments have other indices."""
        return Part(arguments[self.array], None if self.scales is None else arguments[self.scales])


Pieces = list[tuple[Part, ...]]


def keys_in(closed: Any) -> Pieces:
    """The pieces of the keys that the block function of logits multiplies; empty if it reads
    anything else.
    """
    jaxpr = flat_jaxpr(closed).jaxpr
    dots = [eqn for eqn in jaxpr.eqns if eqn.primitive is grouped_dot_p]
    return _pieces(jaxpr, dots[0].invars[0]) if len(dots) == 1 else []


def values_in(closed: Any) -> Pieces:
    """The pieces of the values that a block function returns, with 0 for what is not finite; empty
    if it returns anything else.
    """
    jaxpr = flat_jaxpr(closed).jaxpr
    return _pieces(jaxpr, jaxpr.outvars[0])


def _pieces(jaxpr: Any, v: Any) -> Pieces:
    made_by = {x: eqn for eqn in jaxpr.eqns for x in eqn.outvars}
    arguments = {x: i for i, x in enumerate(jaxpr.invars)}

    def scales(v: Any) -> int | None:
        while not isinstance(v, Literal) and v not in arguments:
            eqn = made_by.get(v)
            if eqn is None or eqn.primitive not in _SAME:
                return None
            v = eqn.invars[0]
        flat = not isinstance(v, Literal) and v.aval.ndim == 2 and v.aval.shape[0] == 1
        return arguments[v] if flat else None

    def pieces(v: Any) -> Pieces:
        if isinstance(v, Literal):
            return []
        if v in arguments:
            return [(Part(arguments[v]),)] if v.aval.ndim == 3 else []
        eqn = made_by.get(v)
        if eqn is None:
            return []
        if eqn.primitive in _SAME and eqn.invars[0].aval.size == v.aval.size:
            return pieces(eqn.invars[0])
        if eqn.primitive is lax.select_n_p:
            finite, kept = made_by.get(eqn.invars[0]), eqn.invars[-1]
            if finite is None or finite.primitive is not lax.is_finite_p:
                return []
            return pieces(kept) if finite.invars[0] is kept else []
        if eqn.primitive is lax.mul_p:
            whole, i = pieces(eqn.invars[0]), scales(eqn.invars[1])
            alone = len(whole) == 1 and len(whole[0]) == 1 and whole[0][0].scales is None
            return [(Part(whole[0][0].array, i),)] if alone and i is not None else []
        if eqn.primitive is lax.concatenate_p:
            found = [pieces(x) for x in eqn.invars]
            if eqn.params["dimension"] == 0:
                return [piece for x in found for piece in x] if all(found) else []
            same = eqn.params["dimension"] == v.aval.ndim - 1 and len({*map(len, found)}) == 1
            return [sum(x, ()) for x in zip(*found)] if same else []
        if eqn.primitive is lax.slice_p:  # it takes the first parts of the features
            start, stop = eqn.params["start_indices"], eqn.params["limit_indices"]
            whole = eqn.invars[0].aval.shape
            first = not any(start) and stop[:-1] == whole[:-1] and not eqn.params["strides"]
            return [_leading(jaxpr, x, stop[-1]) for x in pieces(eqn.invars[0])] if first else []
        return []

    found = pieces(v)
    return found if all(found) and len({*map(len, found)}) == 1 else []


def _leading(jaxpr: Any, piece: tuple[Part, ...], size: int) -> tuple[Part, ...]:
    """The parts of a piece that are its first features; none where a part would be cut."""
    for n in range(1, len(piece) + 1):
        if sum(jaxpr.invars[part.array].aval.shape[-1] for part in piece[:n]) == size:
            return piece[:n]
    return ()
