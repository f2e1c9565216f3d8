"""What the code of a user's function tells without running it."""

import dis
import functools as ft
import sys
import sysconfig
import types
from collections.abc import Iterator
from typing import Any


JAX = ("jax", "jaxlib")  # the modules of what `jax.jit`, `jax.custom_jvp` and the like make
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME")
_PURE, _PLAT = sysconfig.get_path("purelib"), sysconfig.get_path("platlib")


@ft.lru_cache(1024)
def is_installed(module: str) -> bool:
    """Whether a module is Python's or that of an installed package, whose functions count as
    constants.
    """
    root, file = module.split(".")[0], getattr(sys.modules.get(module), "__file__", None)
    if root in (*JAX, __name__.split(".")[0], *sys.stdlib_module_names):
        return True
    return file is not None and file.startswith((_PURE, _PLAT))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code, and those of the functions, lambdas and comprehensions inside it."""
    yield code
    for x in code.co_consts:
        if isinstance(x, types.CodeType):
            yield from _codes(x)


@ft.lru_cache(1024)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """All names in the code that may be those of globals or attributes. Those for `getattr` are
    among its constants.
    """
    read = [(*c.co_names, *filter(_is_name, c.co_consts)) for c in _codes(code)]
    return tuple(dict.fromkeys(name for names in read for name in names))


@ft.lru_cache(1024)
def globals_of(code: types.CodeType) -> tuple[str, ...]:
    """The names that the code reads as globals."""
    read = [i.argval for c in _codes(code) for i in dis.get_instructions(c) if i.opname in _LOADS]
    return tuple(dict.fromkeys(read))


def _is_name(x: Any) -> bool:
    return isinstance(x, str) and x.isidentifier()


@ft.lru_cache(1024)
def writes_outside(code: types.CodeType) -> bool:
    """Whether the code assigns to a variable outside of the function.

    Such a function is not put together again, since a copy would assign to other cells.
    """
    return any(
        i.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
        or (i.opname in ("STORE_DEREF", "DELETE_DEREF") and i.argval in code.co_freevars)
        for c in _codes(code)
        for i in dis.get_instructions(c)
    )
