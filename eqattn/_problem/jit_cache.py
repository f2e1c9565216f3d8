"""A `jax.jit` for functions of modules, cached by value.

Equal but rebuilt masks, scores and strategies reuse one trace, in an eager loop too. What users'
functions are compared by is held weakly, so that the cache never keeps alive what they captured.
"""

import functools as ft
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from .._closure import Closure


class _Jits:
    """One jitted function per combination of objects that users' functions are compared by. It dies
    with any of them, and with it all that its traces captured.
    """

    def __init__(self, make: Callable):
        self.make, self.jitted, self.further = make, make(), weakref.WeakKeyDictionary()

    def of(self, owner: Any) -> "_Jits":
        if owner not in self.further:
            self.further[owner] = _Jits(self.make)
        return self.further[owner]


def cached(fn: Callable) -> Callable:
    """`fn(*trees, **static)` jitted: arrays are traced, all else is static."""

    def make():
        @ft.partial(jax.jit, static_argnums=(1, 2, 3))
        def jitted(arrays, treedef, others, static):
            leaves = iter(arrays)
            leaves = [next(leaves) if kind is _ARRAY else x for kind, x in others]
            return fn(*jax.tree.unflatten(treedef, leaves), **dict(static))

        return jitted

    root = _Jits(make)

    @ft.wraps(fn)
    def call(*trees, **static):
        node = root
        for x in jax.tree.leaves(trees, is_leaf=lambda x: isinstance(x, Closure)):
            for owner in x.recipe.owners if isinstance(x, Closure) else ():
                node = node.of(owner())
        leaves, treedef = jax.tree.flatten(trees)
        arrays = [x for x in leaves if isinstance(x, jax.Array | np.ndarray)]
        others = tuple(  # by type too: 1 == True == 1.0
            (_ARRAY, None) if isinstance(x, jax.Array | np.ndarray) else (type(x), x)
            for x in leaves
        )
        return node.jitted(arrays, treedef, others, tuple(sorted(static.items())))

    return call


_ARRAY = type("Traced", (), {"__repr__": lambda self: "traced"})()
