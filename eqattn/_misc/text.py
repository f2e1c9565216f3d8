"""The text of modules, which leaves out what their constructors fill in by themselves."""

import dataclasses
import inspect
from typing import Any

import jax
import numpy as np


def without_defaults(self: Any, **how: Any) -> Any:
    """The `__pdoc__` of a module, by which Equinox prints it: a constructor call that leaves out
    defaults.

    A constructor that needs no arguments is called with those that were printed so far, and says
    what the next field would be. So a field that follows from another one is left out, too. Else
    the defaults are those of the parameters with the names of fields, and a field without one is
    left out where it is None.

    **Arguments:**

    - `how`: the options of `wadler_lindig.pdoc`, which it passes on.
    """
    if not how["hide_defaults"]:
        return None
    import wadler_lindig as wl  # calls this, so that it is there without being a dependency

    parameters, shown = inspect.signature(type(self)).parameters, {}
    for field in dataclasses.fields(self):
        public = field.name.removeprefix("_")  # as of a property for a field that may be `Static`
        name = public if public in parameters else field.name
        if not field.repr or not hasattr(self, name):
            continue
        value = getattr(self, name)
        if not same_value(value, _default(type(self), field, name, shown)):
            shown[name] = value
    return wl.bracketed(
        begin=wl.TextDoc(f"{type(self).__name__}("),
        docs=wl.named_objs(shown.items(), **how),
        sep=wl.comma,
        end=wl.TextDoc(")"),
        indent=how["indent"],
    )


def _default(cls: Any, field: Any, name: str, given: dict[str, Any]) -> Any:
    """What a constructor makes a field of this public name, if it gets these arguments."""
    parameters = inspect.signature(cls).parameters
    needed = [p for p in parameters.values() if p.default is p.empty and p.kind not in _ANY_NUMBER]
    if not needed and given.keys() <= parameters.keys():
        try:
            return getattr(cls(**given), name)
        except Exception:  # leaves may be any objects, as after `jax.tree.map`
            pass
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return parameters[name].default if name in parameters else None


_ANY_NUMBER = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


def same_value(x: Any, y: Any) -> bool:
    """Whether two values are known to be the same, without comparing what arrays hold."""
    try:
        (xs, of_x), (ys, of_y) = jax.tree.flatten(x), jax.tree.flatten(y)
        return of_x == of_y and all(map(_same_leaf, xs, ys))
    except Exception:  # objects of any kind may refuse to be compared
        return False


def _same_leaf(x: Any, y: Any) -> bool:
    arrays = jax.Array | np.ndarray | jax.ShapeDtypeStruct
    if isinstance(x, arrays) or isinstance(y, arrays):
        return x is y
    return type(x) is type(y) and bool(x == y)
