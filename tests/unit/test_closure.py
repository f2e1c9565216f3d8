"""What users' functions read from outside: as it is at each call, differentiated, and traced once."""

import functools as ft
import gc
import types
import weakref

import equinox as eqx
import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from matrix import bound, oracle

from eqattn import attention, AttentionMetadata, Blockwise, MaskFn, ScoreFn


B, T, H, D = 2, 9, 2, 4
COMPILED = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: COMPILED.append(event) if event.endswith("trace_duration") else None
)


@pytest.fixture(autouse=True)
def wide(x64):
    """In float64."""


def draw():
    rng = np.random.default_rng(0)
    return [rng.standard_normal((B, T, H, D)) for _ in range(3)]


def attend(score=None, mask=None):
    strategy = Blockwise(AttentionMetadata(runtime_dtype="float64", blocksize_q=4, blocksize_k=4))
    q, k, v = map(jnp.asarray, draw())
    return attention(q, k, v, strategy, score=score, mask=mask).attention_outputs


def judge(w, value, gradient):
    """Of `sum(outputs)`, where logits are multiplied by `w`; a NumPy `w` has no gradient."""
    precision = bound.precision_of(np.float64)
    problem = oracle.Problem(*draw(), scale=np.float64(w) * D**-0.5)
    out = bound.values(problem, precision)["out"]
    grads = bound.grads(problem, np.ones((B, T, H, D)), np.zeros((B, T, H)), precision)
    value = np.asarray(value)
    assert abs(value - out.primal.sum()) <= 2 * out.error.sum()
    if gradient is not None:
        want, gradient = grads["scale"], np.asarray(gradient)
        assert abs(gradient - want.primal * D**-0.5) <= 2 * want.error * D**-0.5


class Plain:
    def __init__(self, w):
        self.w = w


class Held(eqx.Module):
    w: jax.Array

    def method(self, z, b, h, q, k):
        return z * self.w


def by_cell():
    w = jnp.ones(())

    def change(x):
        nonlocal w
        w = x

    return lambda z, b, h, q, k: z * w, change


def by_default():
    def fn(z, b, h, q, k, w=jnp.ones(())):
        return z * w

    def change(x):
        fn.__defaults__ = (x,)

    return fn, change


def by_keyword():
    def fn(z, b, h, q, k, *, w=jnp.ones(())):
        return z * w

    def change(x):
        fn.__kwdefaults__ = {"w": x}

    return fn, change


def by_list():
    held = [jnp.ones(())]
    return lambda z, b, h, q, k: z * held[0], lambda x: held.__setitem__(0, x)


def by_inner_function():
    held = {"w": jnp.ones(())}
    inner = lambda z: z * held["w"]
    return lambda z, b, h, q, k: inner(z), lambda x: held.update(w=x)


def by_module():
    module = Held(jnp.ones(()))

    def change(x):
        nonlocal module
        module = Held(x)

    return lambda z, *at: module.method(z, *at), change


def beside_what_cannot_be_compared():
    w, seen = jnp.ones(()), []

    def change(x):
        nonlocal w
        w = x

    def fn(z, b, h, q, k):
        seen.append(None)
        return z * w

    return fn, change


GLOBALS = """
def helper(z):
    return inner(z)

inner = lambda z: z * {read}

def by_global(z, b, h, q, k):
    return [z * {read} for _ in range(1)][0]

def by_global_function(z, b, h, q, k):
    return helper(z)
"""


def by_global(read="w", name="by_global"):
    space = {}
    exec(GLOBALS.format(read=read), space)

    def change(x):
        space.update(w=x, table={"w": x, "other": "of no number"}, held=Held(x))

    change(jnp.ones(()))
    return space[name], change


def by_global_dict():
    return by_global("table['w']")


def by_global_module():
    return by_global("held.w")


def by_global_function():
    return by_global(name="by_global_function")


CHANGES = [
    by_cell, by_default, by_keyword, by_list, by_inner_function, by_module, beside_what_cannot_be_compared,
    by_global, by_global_dict, by_global_module, by_global_function,
]  # fmt: skip


@pytest.mark.parametrize("how", [by_cell, by_module, by_global_dict], ids=lambda f: f.__name__)
def test_an_array_that_changes_between_eager_calls(how):
    fn, change = how()
    score = ScoreFn(fn)

    def loss(w):
        change(w)
        return attend(score).sum()

    for w in (1.0, 0.25, -2.0):
        judge(w, *jax.value_and_grad(loss)(jnp.asarray(w)))
        judge(w, loss(jnp.asarray(w)), None)


def test_a_numpy_array_that_changes_in_place():
    w = np.ones(())
    score = ScoreFn(lambda z, b, h, q, k: z * jnp.asarray(w))
    for x in (1.0, 0.25):
        w[...] = x
        judge(x, attend(score).sum(), None)


def test_a_mask_over_an_array_that_changes():
    ends = jnp.zeros(B, jnp.int32)
    mask = MaskFn(lambda b, h, q, k: k < ends[b])
    for new in ([3, 9], [0, 5]):
        ends = jnp.asarray(new, jnp.int32)
        visible = (np.arange(T) < np.asarray(new)[:, None])[:, None, None]
        want = oracle.forward(oracle.Problem(*draw(), scale=D**-0.5, mask=visible)).out
        np.testing.assert_allclose(attend(mask=mask), want, rtol=0, atol=1e-14)


def anew(w):
    return ScoreFn(lambda z, b, h, q, k: z * w)


def anew_partial(w):
    return ScoreFn(ft.partial(lambda factor, z, b, h, q, k: z * factor, w))


def anew_method(w):
    return ScoreFn(Held(w).method)


def anew_nested(w):
    double = lambda x: 2 * x
    return ScoreFn(lambda z, b, h, q, k: jnp.tanh(z) * 0 + double(z) * w / 2)


@pytest.mark.parametrize("make", [anew, anew_nested])
def test_a_function_that_is_made_anew_is_compiled_once(make):
    def loss(w):
        return attend(make(w)).sum()

    for transform in (lambda f: f, jax.value_and_grad):
        transform(loss)(jnp.asarray(1.0))
        del COMPILED[:]
        results = [transform(loss)(jnp.asarray(w)) for w in (0.5, 2.0)]
        assert not COMPILED
        for w, result in zip((0.5, 2.0), results):
            judge(w, *(result if isinstance(result, tuple) else (result, None)))


class Settings:
    """A class whose attributes are read as those of a module are."""

    w = 1.0

    @classmethod
    def scaled(cls, z, b, h, q, k):
        return z * cls.w


HELPER = types.ModuleType("helper_that_is_imported")
exec("w = 1.0\ndef scaled(z):\n    return z * w", HELPER.__dict__)
SPACES = {
    "class": (Settings, lambda: lambda z, b, h, q, k: z * Settings.w),
    "module": (HELPER, lambda: lambda z, b, h, q, k: z * HELPER.w),
    "function of a module": (HELPER, lambda: lambda z, b, h, q, k: HELPER.scaled(z)),
    "default": (HELPER, lambda: lambda z, b, h, q, k, x=HELPER: z * x.w),
    "partial": (Settings, lambda: ft.partial(lambda x, z, b, h, q, k: z * x.w, Settings)),
    "classmethod": (Settings, lambda: Settings.scaled),
    "by its name": (Settings, lambda: lambda z, b, h, q, k: z * getattr(Settings, "w")),
}


@pytest.mark.parametrize(
    "how, kind",
    [
        ("class", "array"),
        ("function of a module", "number"),
        ("default", "array"),
        ("partial", "number"),
        ("classmethod", "array"),
        ("by its name", "number"),
    ],
)
def test_a_new_function_reads_what_a_class_or_a_module_holds_now(how, kind, monkeypatch):
    space, make = SPACES[how]
    monkeypatch.setattr(space, "w", 1.0)

    def loss(w):
        space.w = w
        return attend(ScoreFn(make())).sum()

    for w in (1.0, 0.25):
        judge(w, loss(w if kind == "number" else jnp.asarray(w)), None)
    if kind == "array" and how != "classmethod":  # that is one function, traced once
        for w in (1.0, -2.0):
            judge(w, *jax.value_and_grad(loss)(jnp.asarray(w)))


@pytest.mark.parametrize("space", [HELPER], ids=["module"])
def test_equal_values_of_several_names_are_told_apart(space, monkeypatch):
    """(1, 1, 2) and (1, 2, 2) are the same two objects, under other names."""
    put = monkeypatch.setitem if isinstance(space, dict) else ft.partial(monkeypatch.setattr, raising=False)  # fmt: skip
    for values in ((1, 1, 2), (1, 2, 2), (2, 2, 1)):
        for name, value in zip(("first", "second", "third"), values):
            put(space, name, value)
        if isinstance(space, dict):
            fn = lambda z, b, h, q, k: z * (first + 10 * second + 100 * third) / 100  # noqa: F821
        else:
            fn = lambda z, b, h, q, k: z * (space.first + 10 * space.second + 100 * space.third) / 100  # fmt: skip
        w = (values[0] + 10 * values[1] + 100 * values[2]) / 100
        judge(w, attend(ScoreFn(fn)).sum(), None)


def test_what_no_function_reads_off_a_module_is_not_in_its_key():
    def loss(w):
        HELPER.other = w
        return attend(ScoreFn(lambda z, b, h, q, k: z * HELPER.w)).sum()

    loss(1.0)
    del COMPILED[:]
    loss(2.0)
    assert not COMPILED


def test_the_count_of_traces_would_see_one():
    del COMPILED[:]
    jax.jit(lambda x: x + 1)(1)
    assert COMPILED


def test_second_order_through_a_function_that_is_made_anew():
    loss = lambda w: jnp.sum(attend(anew(w)))
    step = 1e-5
    for w in (0.5, 2.0):
        got = jax.hessian(loss)(jnp.asarray(w))
        ends = [jax.grad(loss)(jnp.asarray(w + d)) for d in (step, -step)]
        np.testing.assert_allclose(got, (ends[0] - ends[1]) / (2 * step), rtol=1e-7)


CONSTANTS = [(0.0, -0.0), (1, True, 1.0), (np.float64(2), 2.0), ("a", b"a"), ((1, 2), (1.0, 2))]


@pytest.mark.parametrize("constants", CONSTANTS[:2], ids=str)
def test_constants_are_told_apart(constants):
    """Also equal ones, of other types or signs."""
    seen = []

    def run(x, note=seen.append):
        def fn(z, b, h, q, k):
            note(x)
            return z

        return ScoreFn(fn)

    jitted = lambda x: ScoreFn(lambda z, b, h, q, k: z * (1 + (repr(x) == repr(constants[0]))))
    for i, x in enumerate(constants):
        judge(2.0 if i == 0 else 1.0, attend(jitted(x)).sum(), None)
    for x in constants:
        attend(run(x))
    assert {repr(x) for x in seen} == {repr(x) for x in constants}


CODE = """
def helper(z):
    return z * {factor}

def make(ScoreFn):
    return ScoreFn(lambda z, b, h, q, k: helper(z))
"""


@pytest.mark.parametrize("factor", ["w", "float(w)", "table['w']", "holder.w"])
def test_globals_of_a_function_that_is_made_anew(factor):
    """Such as the parameters of a script that is not in a function."""
    space = {}
    exec(CODE.format(factor=factor), space)
    for w in (1.0, 0.25, -2.0):
        x = w if factor.startswith("float") else jnp.asarray(w)
        space |= {"w": x, "table": {"w": x}, "holder": types.SimpleNamespace(w=x)}
        judge(w, attend(space["make"](ScoreFn)).sum(), None)


def test_a_function_that_writes_to_its_surroundings():
    count, w = 0, jnp.asarray(0.25)

    def fn(z, b, h, q, k):
        nonlocal count
        count += 1
        return z * w

    judge(0.25, attend(ScoreFn(fn)).sum(), None)
    assert count > 0


def test_a_function_that_calls_itself():
    w = jnp.asarray(0.5)

    def fn(z, b, h, q, k, times=2):
        return z if times == 0 else fn(z * w, b, h, q, k, times - 1)

    judge(0.25, attend(ScoreFn(fn)).sum(), None)


@pytest.mark.parametrize("make", [anew_method])
def test_what_a_function_holds_is_freed_with_it(make):
    def run():
        w = jnp.asarray(0.5)
        jax.grad(lambda q: attend(make(w)).sum() * q)(1.0)
        return weakref.ref(w)

    w = run()
    gc.collect()
    assert w() is None


def test_objects_that_cannot_be_compared_are_freed_with_the_function():
    def run():
        holder = Plain(jnp.asarray(0.5))
        judge(0.5, attend(ScoreFn(lambda z, b, h, q, k: z * holder.w)).sum(), None)
        return weakref.ref(holder)

    holder = run()
    gc.collect()
    assert holder() is None
