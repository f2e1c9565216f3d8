"""Users' functions as PyTrees of what they close over.

A user's function as a PyTree: the arrays that it reads from outside are leaves.

No transformation of JAX looks where Python keeps these arrays. They are in cells of a closure, in
defaults, in arguments of a `functools.partial`, or in the object that a method is bound to. As
leaves they are ordinary arguments: they are differentiated, mapped and sharded, and new arrays need
no new trace. Everything else that the function reads is its key. A loss, for example, may define a
function again at each call. A cache takes it for the same function while its code and key are the
same.

A value that is neither an array nor immutable, such as an ordinary object or a list without arrays,
cannot be compared from one call to the next: nothing tells when it changes. A function that reads
one is never remembered. Each call traces it anew, and `trace.py` has what the trace finds.

For example, `lambda b, h, q, k: k < lengths[b] + 1`, with a JAX array `lengths` around it, has the
leaf `lengths`. Its key consists of the code, with the constant 1, and of a note that its one cell
holds an array. Each call with a new lambda of this code finds the same key, and puts its own array
into the cell.

What the code of a user's function tells without running it.
"""

import dataclasses
import dis
import enum
import functools as ft
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import equinox as eqx
import jax
import numpy as np

from ._misc import Static


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


class _Same:
    """A key for an object that is equal to itself only, and that the key does not keep alive."""

    def __init__(self, x: Any):
        self._ref, self._hash = weakref.ref(x), id(x)

    def __hash__(self):
        return self._hash

    def __eq__(self, other):
        return isinstance(other, _Same) and self() is not None and self() is other()

    def __call__(self):
        return self._ref()


@dataclasses.dataclass(frozen=True)
class _Part:
    """A value that a function reads, as a key and arrays.

    **Arguments:**

    - `key`: a hashable value that is equal for parts which differ in their arrays only.
    - `again`: a function that puts the value together, given an iterator of arrays. It keeps
        nothing alive that the key does not.
    - `arrays`: the arrays, in the order in which `again` takes them.
    - `owners`: the objects in the key that are compared by identity.
    - `known`: whether key and arrays determine the value. If not, the value may change without the
        key, and nothing else here is used.
    """

    key: Hashable
    again: Callable[[Iterator], Any]
    arrays: tuple = ()
    owners: tuple[_Same, ...] = ()
    known: bool = True


_UNKNOWN = _Part("unknown", lambda _: None, known=False)


class Recipe:
    """The static half of a `Closure`: how a function is made from its arrays, hashed by its key.

    **Arguments:**

    - `key`, `again`, `owners`: as for `_Part`. None for a key means that nothing else is equal, so
        that no cache may hold what was traced with it.
    """

    def __init__(
        self,
        key: Hashable,
        again: Callable[[Iterator], Callable],
        owners: tuple[_Same, ...] = (),
    ):
        self.remembered = key is not None
        self.key, self.again, self.owners = key if self.remembered else object(), again, owners
        self._hash = hash(self.key)

    def __hash__(self):
        return self._hash

    def __eq__(self, other):
        return isinstance(other, Recipe) and self.key == other.key


class Closure(eqx.Module):
    """A function whose arrays are leaves. The module's docstring says which arrays."""

    arrays: tuple[Any, ...]
    recipe: Recipe = eqx.field(static=True)

    def function(self) -> Callable:
        """The function with the current leaves in place of the arrays that it read."""
        return self.recipe.again(iter(self.arrays))


def closure_of(fn: Callable) -> Closure | None:
    """A function as what it closes over; None if that may change unseen."""
    try:
        part = _take(_method_of(fn), ())
    except TypeError:  # some callables have no weak references, and some keys no hash
        return None
    return Closure(part.arrays, Recipe(part.key, part.again, part.owners)) if part.known else None


def _method_of(fn: Any) -> Any:
    """What Python runs when it calls an object: the method of its class, bound to it."""
    if isinstance(fn, (types.FunctionType, types.MethodType, ft.partial, *_NAMED)) or _is_jax(fn):
        return fn
    owner, function = fn, type(fn).__call__
    if isinstance(fn, eqx.Module) and hasattr(fn, "__func__"):  # Equinox binds its own way
        owner, function = getattr(fn, "__self__"), getattr(fn, "__func__")
    return types.MethodType(function, owner) if isinstance(function, types.FunctionType) else fn


def held(fn: Any) -> Any:
    """A function as the value of a field. A PyTree stays one, and all others are static values. An
    object is represented by the method that is called, since a method is hashed by identity.

    **Raises:** `TypeError` if it is not callable.
    """
    if not callable(fn):
        raise TypeError(f"fn must be callable, got {fn!r}.")
    return Static(_method_of(fn)) if jax.tree_util.all_leaves((fn,)) else fn


def function_of(x: Any) -> Any:
    """The function in a field that holds a `Closure`, a static function, or the function itself."""
    if isinstance(x, Closure):
        return x.function()
    return x.value if isinstance(x, Static) else x


# Immutable values, which are keys by themselves.
_VALUES = (
    bool,
    int,
    str,
    bytes,
    float,
    complex,
    enum.Enum,
    np.dtype,
    np.generic,
    types.EllipsisType,
)
# Objects that are in effect constants, known by their identity. What a function reads from the
# spaces among them is taken with its globals.
_SPACES = (type, types.ModuleType)
_NAMED = (*_SPACES, types.BuiltinFunctionType, np.ufunc)
# What the functions and the slots of a class that is written in C are in its dictionary.
_DESCRIPTORS = (
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.WrapperDescriptorType,
)


def _is_jax(x: Any) -> bool:
    """Whether it is a callable that `jax.jit`, `jax.custom_jvp` and the like made."""
    return callable(x) and type(x).__module__.split(".")[0] in JAX


def _take(x: Any, within: tuple[int, ...] = ()) -> _Part:
    """Splits a value that a function reads into a key and arrays.

    **Arguments:**

    - `x`: the value.
    - `within`: the ids of the functions that hold the value. If one of these contains itself, as a
        recursive function does, it is not split again.
    """
    if isinstance(x, jax.Array):
        return _Part("array", next, (x,))
    # The type and the text are in the key since 1 == True == 1.0 and 0.0 == -0.0.
    if x is None or isinstance(x, _VALUES):
        return _Part((type(x), repr(x) if isinstance(x, float | complex | np.generic) else x),
                     lambda _: x)  # fmt: skip
    if isinstance(x, np.ndarray) and not x.dtype.hasobject:
        data, dtype, shape = x.tobytes(), x.dtype, x.shape
        again = lambda _: np.frombuffer(data, dtype).reshape(shape)
        return _Part((np.ndarray, dtype, shape, data), again)
    if isinstance(x, types.FunctionType) and id(x) not in within:
        return _take_function(x, (*within, id(x)))
    if isinstance(x, types.MethodType):
        return _take_method(x, within)
    if isinstance(x, ft.partial):
        return _take_partial(x, within)
    try:
        if isinstance(x, _NAMED) or _is_jax(x):
            same = _Same(x)
            return _Part(same, lambda _: same(), owners=(same,))
        leaves, treedef = jax.tree.flatten(x)
        hash(treedef)
    except TypeError:
        return _UNKNOWN
    if jax.tree_util.treedef_is_leaf(treedef):
        return _UNKNOWN
    parts = [_take(leaf, within) for leaf in leaves]
    whole = _joined(treedef, parts, lambda *xs: jax.tree.unflatten(treedef, xs))
    if whole.arrays or isinstance(x, tuple | eqx.Module):
        return whole
    # A list without arrays may change, and a copy would not be the object that others hold.
    return _UNKNOWN


def _joined(kind: Hashable, parts: list[_Part], join: Callable) -> _Part:
    """A whole of several parts: `join` makes it of their values, and `kind` says how in the key."""
    again = [p.again for p in parts]
    return _Part(
        (kind, *[p.key for p in parts]),
        lambda xs: join(*[f(xs) for f in again]),
        tuple(x for p in parts for x in p.arrays),
        tuple(x for p in parts for x in p.owners),
        all(p.known for p in parts),
    )


def _take_method(method: types.MethodType, within: tuple[int, ...]) -> _Part:
    # A method is its function and the object that it is bound to, which has its class.
    owner, fn = method.__self__, method.__func__
    bound = _take(owner, within)
    if not bound.known or not isinstance(fn, types.FunctionType):
        return _UNKNOWN
    function = _take_function(fn, (*within, id(fn)))
    whole = _joined(types.MethodType, [function, bound], types.MethodType)
    return _with_read(whole, _take_read(names_in(fn.__code__), _spaces([owner])))


def _take_partial(x: ft.partial, within: tuple[int, ...]) -> _Part:
    # The names of keyword arguments are in the key; their values follow the positional ones.
    each = [x.func, *x.args, *x.keywords.values()]
    n, names = 1 + len(x.args), tuple(x.keywords)
    whole = _joined(
        (ft.partial, names),
        [_take(y, within) for y in each],
        lambda *xs: ft.partial(*xs[:n], **dict(zip(names, xs[n:]))),
    )
    code = getattr(x.func, "__code__", None)
    if code is None:
        return whole
    return _with_read(whole, _take_read(names_in(code), _spaces(each[1:])))


def _take_function(fn: types.FunctionType, within: tuple[int, ...]) -> _Part:
    """Splits a Python function into a key and arrays.

    It reads its `n` closure cells, its defaults (up to the index `m`), its keyword defaults (up to
    `o`), and globals. Those are put back into a copy of the function, if there are arrays among
    them; otherwise the function itself is used. Globals without arrays only add to the key.
    """
    ref, code = weakref.ref(fn), fn.__code__
    names, shared = tuple(fn.__kwdefaults__ or ()), _globals_with_arrays(fn, within)
    n = len(fn.__closure__ or ())
    m = n + len(fn.__defaults__ or ())
    o = m + len(names)

    if writes_outside(code):
        return _UNKNOWN
    try:
        cells = [cell.cell_contents for cell in fn.__closure__ or ()]
    except ValueError:  # a cell is empty until its variable is first assigned
        return _UNKNOWN
    outside = [*cells, *(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    parts = [*[_take(x, within) for x in outside], *shared.values()]
    same_arrays = not any(p.arrays for p in parts)

    def join(*xs):
        old: Any = ref()
        if same_arrays:
            return old
        held = tuple(map(types.CellType, xs[:n]))
        space = {**old.__globals__, **dict(zip(shared, xs[o:]))} if shared else old.__globals__
        new = types.FunctionType(code, space, old.__name__, xs[n:m] or None, held)
        new.__kwdefaults__ = dict(zip(names, xs[m:o])) or None
        new.__qualname__ = old.__qualname__
        new.__dict__.update(old.__dict__)
        return new

    whole = _joined((code, names, tuple(shared), n, m), parts, join)
    return _with_read(whole, _take_globals(fn, outside, tuple(shared)))


def _globals_with_arrays(fn: types.FunctionType, within: tuple[int, ...]) -> dict[str, _Part]:
    """The globals that a function reads and that hold arrays, by their names. They are left out if
    something in them may change unseen. Functions of installed packages are not followed, nor
    others beyond a depth that bounds the time.
    """
    space, found = fn.__globals__, {}
    for name in globals_of(fn.__code__):
        x = space.get(name)
        if isinstance(x, types.FunctionType):
            if len(within) > 4 or id(x) in within or is_installed(x.__module__ or ""):
                continue
        elif callable(x) and not isinstance(x, eqx.Module | ft.partial):
            continue
        part = _take(x, within)
        if part.known and part.arrays:
            found[name] = part
    return found


def _with_read(whole: _Part, read: _Part | None) -> _Part:
    """A part whose key also has what its code reads elsewhere; None if that may change unseen."""
    if read is None:
        return _UNKNOWN
    owners = (*whole.owners, *read.owners)
    return dataclasses.replace(whole, key=(whole.key, read.key), owners=owners)


def _take_globals(
    fn: types.FunctionType,
    held: Iterable[Any] = (),
    apart: tuple[str, ...] = (),
    above: tuple[Any, ...] = (),
) -> _Part | None:
    """The key of what a function reads from its module, except for the names `apart`, and from
    modules and classes. It has these there, or holds them otherwise, among `held`. The key is None
    if what it reads may change unseen.
    """
    names, space = names_in(fn.__code__), fn.__globals__
    found = [(name, space[name]) for name in names if name in space and name not in apart]
    return _take_read(names, [*_spaces(held), *found], fn.__globals__, (*above, fn))


def _spaces(xs: Iterable[Any]) -> list[tuple[str, Any]]:
    """The modules and classes among some values, and the classes of which others are. They have no
    names here.
    """
    spaces = [x if isinstance(x, _SPACES) else type(x) for x in xs]
    return [("", x) for x in spaces if not (isinstance(x, type) and is_installed(x.__module__))]


def _take_read(
    names: tuple[str, ...],
    found: list[tuple[str, Any]],
    space: Any = None,
    above: tuple[Any, ...] = (),
) -> _Part | None:
    """The key of values that code reads by name; None if they may change unseen.

    These values are not replaced when a function is put together again, so a JAX array among them
    counts as one that may change unseen. Functions are followed too, at most four deep, since that
    bounds the time that a key takes. Those of installed packages are not.

    **Arguments:**

    - `names`: the names in the code. It may read the attributes with these names of each module and
        class that it has.
    - `found`: the values, each with its name. A name is in the key, too, as two names may have one
        value at first and others later.
    - `space`: the globals of the code.
    - `above`: the functions through which the code was reached, and its own. The key has them.
    """
    parts, read, left, followed = [], [], [*found], set()
    while left:
        name, x = left.pop()
        x = x.__func__ if isinstance(x, staticmethod | classmethod) else x
        x = x.fget if isinstance(x, property) else x
        if isinstance(x, _DESCRIPTORS):
            continue
        read.append((name, len(parts)))
        first = id(x) not in followed
        followed.add(id(x))
        if isinstance(x, types.FunctionType):
            first = first and not any(x is y for y in above)
            if first and (x.__globals__ is space or not is_installed(x.__module__ or "")):
                deep = x.__closure__ or len(above) > 4
                inner = None if deep else _take_globals(x, (), (), above)
                if inner is None:
                    return None
                parts.append(inner)
            parts.append(_Part(_Same(x), lambda _: None, owners=(_Same(x),)))
            continue
        part = _take(x)
        if not part.known or part.arrays:
            return None
        parts.append(part)
        if first and isinstance(x, _SPACES) and not isinstance(x, enum.EnumMeta):
            spaces = [vars(y) for y in (x.__mro__ if isinstance(x, type) else (x,))]
            for name in (*names, "__call__"):
                holder = next((y for y in spaces if name in y), None)
                if holder is not None:
                    left.append((name, _plain(holder[name], x)))
    return _joined(("globals", *read), parts, lambda *_: None)


def _plain(x: Any, space: Any) -> Any:
    """What a class or a module has under a name, without what Equinox wraps methods in."""
    wrapped = isinstance(space, type) and issubclass(space, eqx.Module) and not callable(x)
    return x.__get__(None, space) if wrapped and hasattr(x, "__get__") else x
