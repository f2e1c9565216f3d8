"""A `jax.jit` for functions of modules, cached by value.

Masks, scores and strategies that are rebuilt but equal reuse one trace, in an eager loop too. The
objects that users' functions are compared by are held weakly, so the cache never keeps alive what
these functions captured.

The caches form a tree. The root is for calls without any function of a user's. Each such function
leads to one child per object that it is compared by:

    root: jit            calls without users' functions
      f: jit             calls with a function compared by f
        g: jit           calls with two, compared by f and by g

An edge is an entry of a `WeakKeyDictionary`, so a subtree and its traces are dropped with its key.
A call with a function that no key tells from a later one has a root of its own, which is dropped
after it.
"""

import functools as ft
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from .._closure import Closure


class _Jits:
    """A node of the tree: one jitted function per combination of objects that users' functions are
    compared by. It dies with any of them, and so does all that its traces captured.
    """

    def __init__(self, make: Callable):
        self.make, self.jitted, self.further = make, make(), weakref.WeakKeyDictionary()

    def of(self, owner: Any) -> "_Jits":
        """The child for one more object."""
        if owner not in self.further:
            self.further[owner] = _Jits(self.make)
        return self.further[owner]


def cached(fn: Callable) -> Callable:
    """Jits `fn(*trees, **static)`: arrays in the trees are traced, and all else is static."""

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
        leaves = jax.tree.leaves(trees, is_leaf=lambda x: isinstance(x, Closure))
        recipes = [x.recipe for x in leaves if isinstance(x, Closure)]
        node = root if all(x.remembered for x in recipes) else _Jits(make)
        for owner in [owner for x in recipes for owner in x.owners]:
            node = node.of(owner())
        leaves, treedef = jax.tree.flatten(trees)
        arrays = [x for x in leaves if isinstance(x, jax.Array | np.ndarray)]
        others = tuple(  # Types are compared, too, as 1 == True == 1.0.
            (_ARRAY, None) if isinstance(x, jax.Array | np.ndarray) else (type(x), x)
            for x in leaves
        )
        return node.jitted(arrays, treedef, others, tuple(sorted(static.items())))

    return call


_ARRAY = type("Traced", (), {"__repr__": lambda self: "traced"})()
