"""A `jax.jit` for functions of modules, cached by value.

Equal but rebuilt masks, scores and strategies reuse one trace, in an eager loop too. Users'
functions are held weakly, so that the cache never keeps a closure (and what it captured) alive.
"""

import functools as ft
import weakref
from collections.abc import Callable
from types import MethodType

import jax
import numpy as np

from .._misc import Fixed


class _Weak:
    """A function that is equal to itself and is not kept alive."""

    def __init__(self, fn: Callable):
        self._ref = weakref.WeakMethod(fn) if isinstance(fn, MethodType) else weakref.ref(fn)
        self._hash = hash(fn)
        setattr(self, "__qualname__", getattr(fn, "__qualname__", type(fn).__name__))

    def __hash__(self):
        return self._hash

    def __eq__(self, other):
        return isinstance(other, _Weak) and self._ref == other._ref

    def __call__(self, *args):
        fn = self._ref()
        assert fn is not None
        return fn(*args)


class _Jits:
    """One jitted function per combination of users' functions. It dies with any of them, and with
    it all that its traces captured.
    """

    def __init__(self, make: Callable):
        self.make, self.jitted, self.further = make, make(), weakref.WeakKeyDictionary()

    def of(self, fn: Callable) -> "_Jits":
        owner = fn.__self__ if isinstance(fn, MethodType) else fn
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

        def weakly(x):
            nonlocal node
            if isinstance(x, Fixed) and callable(x.value) and not isinstance(x.value, _Weak):
                try:
                    node, x = node.of(x.value), Fixed(_Weak(x.value))
                except TypeError:  # no weak references to this type of callable
                    pass
            return x

        trees = jax.tree.map(weakly, trees, is_leaf=lambda x: isinstance(x, Fixed))
        leaves, treedef = jax.tree.flatten(trees)
        arrays = [x for x in leaves if isinstance(x, jax.Array | np.ndarray)]
        others = tuple(  # by type too: 1 == True == 1.0
            (_ARRAY, None) if isinstance(x, jax.Array | np.ndarray) else (type(x), x)
            for x in leaves
        )
        return node.jitted(arrays, treedef, others, tuple(sorted(static.items())))

    return call


_ARRAY = type("Traced", (), {"__repr__": lambda self: "traced"})()
