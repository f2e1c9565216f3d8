"""Types are complete, and checked at run time. tests/nightly/test_type_checkers.py asks type checkers."""

import collections.abc
import inspect
import typing

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

import eqattn
import eqattn.cache
import eqattn.stats
import eqattn.viz


def _types(annotation):
    """All types that an annotation names, but those of a callable's arguments."""
    args = typing.get_args(annotation)
    if isinstance(annotation, type) or not args:
        yield annotation
    elif typing.get_origin(annotation) is not collections.abc.Callable:
        for arg in args:
            yield from _types(arg)


def _functions(module):
    """The public functions of a module, and the methods of its classes, by name."""
    for name in {*dir(module), *getattr(module, "_UNLISTED", ())}:
        value = getattr(module, name)
        if name.startswith("_") or inspect.ismodule(value):
            continue
        if not inspect.isclass(value):
            yield name, value
            continue
        for attribute, method in vars(value).items():
            method = getattr(method, "__func__", getattr(method, "fget", method))
            if attribute in ("__init__", "__call__") or attribute[0] != "_":
                yield f"{name}.{attribute}", method


def test_every_array_has_a_dtype_and_a_shape():
    """No public function takes or returns `Array` without jaxtyping's `Float[Array, "t d"]`."""
    bare, shaped = [], 0
    for module in (
        eqattn,
        eqattn.masks,
        eqattn.scores,
        eqattn.cache,
        eqattn.compat,
        eqattn.nn,
        eqattn.viz,
        eqattn.stats,
    ):
        for name, function in _functions(module):
            if not inspect.isfunction(inspect.unwrap(function)):
                continue
            for argument, annotation in inspect.get_annotations(function).items():
                found = list(_types(annotation))
                bare += [f"{module.__name__}.{name}: {argument}"] * (jax.Array in found)
                assert not any(isinstance(x, str) and "Array" in x for x in found)
                shaped += any(hasattr(x, "dim_str") for x in found)
    assert not bare
    assert shaped > 200


def test_shapes_are_checked_under_the_hook(request):
    """The suite imports eqattn under jaxtyping's hook, as users may."""
    if not request.config.getoption("--jaxtyping-packages"):
        pytest.skip("without jaxtyping's hook")
    q, k = jnp.ones((2, 8, 4, 16)), jnp.ones((2, 8, 2, 16))
    assert eqattn.ring_attention(q, k, k).shape == q.shape
    for name, args in dict(
        value=(q, k, k[:, :-1]),  # fewer values than keys
        key=(q, k[..., :-1], k),  # another head dim than the query's
        query=(q.astype(int), k, k),
        q_segment_ids=(q, k, k, jnp.ones((2, 8))),
    ).items():
        with pytest.raises(TypeCheckError, match=f"typechecking parameter '{name}'"):
            eqattn.ring_attention(*args)
