"""What a drawn call goes through: transformations of JAX, each with what the oracle says of it.

Each function takes a drawn `Call`, a generator and `run`, a function of the values of the call, and
returns pairs of what was found and what is wanted.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._calls import as_jax, Call, moved, Values, widened
from ._oracle import STEP


Run = Callable[[Values], Any]
Pairs = list[tuple[Any, Any]]
POLICIES = jax.checkpoint_policies


def _has_explicit_axes() -> bool:
    return bool(jax.sharding.get_abstract_mesh().explicit_axes)


def _of_floats(run: Run, others: Any) -> Callable:
    return lambda floats: run((floats, others))


def _solved(call: Call, values: Values) -> tuple[Any, Any]:
    found = call.solve(values)
    return found.output, found.logsumexp


def _value_and_pull(run: Run) -> Callable:
    def program(values: Values, cotangents: Any) -> Any:
        floats, others = values
        outs, pull = jax.vjp(_of_floats(run, others), floats)
        return outs, pull(cotangents)[0]

    return program


def gradient(call: Call, rng: np.random.Generator, run: Run) -> Pairs:
    """Values alone, and values with gradients: JAX may compute them by other rules."""
    values, cts = call.values(rng), call.cotangents(rng)
    outs = jax.jit(run)(as_jax(values))
    both = jax.jit(_value_and_pull(run))(as_jax(values), as_jax(cts))
    want = _solved(call, values)
    return [(outs, want), (both, (want, call.gradients(values, cts)))]


def eager(call: Call, rng: np.random.Generator, run: Run) -> Pairs:
    """Without `jit`, and a pullback that is called twice."""
    values, (first, second) = call.values(rng), [call.cotangents(rng) for _ in range(2)]
    floats, others = as_jax(values)
    outs, pull = jax.vjp(_of_floats(run, others), floats)
    found = [pull(as_jax(cts))[0] for cts in (first, second, first)]
    a, b = (call.gradients(values, cts) for cts in (first, second))
    return [(outs, _solved(call, values)), (found, [a, b, a])]


def _directions(call: Call, rng: np.random.Generator, values: Values) -> Any:
    draw = lambda x: np.asarray(rng.standard_normal(np.shape(x)), x.dtype)
    return jax.tree.map(draw, values[0])


def forward_mode(call: Call, rng: np.random.Generator, run: Run) -> Pairs:
    """`jvp`, and `linearize` of it in another program."""
    values = call.values(rng)
    tangents = _directions(call, rng, values)

    def program(values: Values, tangents: Any) -> Any:
        f = _of_floats(run, values[1])
        return jax.jvp(f, (values[0],), (tangents,)), jax.linearize(f, values[0])[1](tangents)

    (outs, dots), linear = jax.jit(program)(as_jax(values), as_jax(tangents))
    want = [x.imag / STEP for x in _solved(call, moved(values, tangents))]
    return [(outs, _solved(call, values)), (dots, want), (linear, want)]


def second_order(call: Call, rng: np.random.Generator, run: Run) -> Pairs:
    """A Hessian-vector product in one of three ways."""
    values, cts = call.values(rng), call.cotangents(rng)
    tangents, way = _directions(call, rng, values), int(rng.integers(3))

    def program(values: Values, cts: Any, tangents: Any) -> Any:
        floats, others = values
        f = _of_floats(run, others)
        gradient = lambda x: jax.vjp(f, x)[1](cts)[0]
        if way == 0:
            return jax.jvp(gradient, (floats,), (tangents,))[1]
        if way == 1:
            return jax.vjp(gradient, floats)[1](tangents)[0]
        along = lambda x: jax.jvp(f, (x,), (tangents,))[1]
        return jax.vjp(along, floats)[1](cts)[0]

    got = jax.jit(program)(*as_jax((values, cts, tangents)))
    wanted = call.gradients(moved(values, tangents), cts)
    return [(got, jax.tree.map(lambda x: np.imag(x) / STEP, wanted))]


def _variants(call: Call, rng: np.random.Generator, n: int) -> tuple[list[Values], Any, Any]:
    """Values that share some leaves, all of them stacked, and which leaves are mapped."""
    first, *rest = (call.values(rng) for _ in range(n))
    share = jax.tree.map(lambda x: bool(rng.integers(2)), first)
    jax.tree.map(lambda x: x, share)
    rest = [jax.tree.map(lambda s, a, b: a if s else b, share, first, x) for x in rest]
    axes = jax.tree.map(lambda s, x: None if s else int(rng.integers(np.ndim(x) + 1)), share, first)
    axes[0]["query"] = 0  # at least one is mapped
    rest = [({**x[0], "query": call.values(rng)[0]["query"]}, x[1]) for x in rest]
    variants = [first, *rest]

    def stacked(axis: Any, *xs: Any) -> Any:
        return xs[0] if axis is None else np.stack(xs, axis)

    together = jax.tree.map(stacked, axes, *variants, is_leaf=lambda x: x is None)
    return variants, together, axes


def _added(axes: Any, found: list[Any]) -> Any:
    """The gradients of stacked leaves, and the sums of those of shared ones."""

    def join(axis: Any, *xs: Any) -> Any:
        return sum(np.asarray(x) for x in xs) if axis is None else np.stack(xs, axis)

    return jax.tree.map(join, axes, *found, is_leaf=lambda x: x is None)


def mapped(call: Call, rng: np.random.Generator, run: Run) -> Pairs:
    """`vmap` over some leaves, of the gradient or in it."""
    variants, together, axes = _variants(call, rng, n := int(rng.integers(1, 4)))
    cts = [call.cotangents(rng) for _ in range(n)]
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *cts)
    inside = bool(rng.integers(2))
    each = jax.tree.map(lambda *xs: np.stack(xs), *[_solved(call, x) for x in variants])
    grads = [call.gradients(x, c) for x, c in zip(variants, cts, strict=True)]
    if inside:
        f = lambda values: jax.vmap(run, (axes,))(values)
        both = jax.jit(_value_and_pull(f))(*as_jax((together, stacked)))
        return [(both, (each, _added(axes[0], grads)))]
    f = jax.vmap(_value_and_pull(run), (axes, 0))
    both = jax.jit(f)(*as_jax((together, stacked)))
    return [(both, (each, jax.tree.map(lambda *xs: np.stack(xs), *grads)))]


def mapped_twice(call: Call, rng: np.random.Generator, run: Run) -> Pairs:
    """`vmap` of `vmap`, with leaves that either, both or none maps."""
    m, n = (int(x) for x in rng.integers(1, 3, 2))
    rows = [call.values(rng) for _ in range(m * n)]
    kinds = jax.tree.map(lambda x: int(rng.integers(4)), rows[0])
    kinds[0]["query"] = 3

    def pick(i: int, j: int) -> Values:
        at = {0: 0, 1: i * n, 2: j, 3: i * n + j}
        return jax.tree.map(lambda kind, *xs: xs[at[kind]], kinds, *rows)

    grid = [[pick(i, j) for j in range(n)] for i in range(m)]

    def stacked(kind: int, *xs: Any) -> Any:
        xs = np.stack(xs).reshape(m, n, *np.shape(xs[0]))
        return {0: xs[0, 0], 1: xs[:, 0], 2: xs[0], 3: xs}[kind]

    together = jax.tree.map(stacked, kinds, *[x for row in grid for x in row])
    outer = jax.tree.map(lambda kind: 0 if kind in (1, 3) else None, kinds)
    inner = jax.tree.map(lambda kind: 0 if kind in (2, 3) else None, kinds)
    cts = [[call.cotangents(rng) for _ in range(n)] for _ in range(m)]
    rowwise = lambda xs: jax.tree.map(lambda *ys: np.stack(ys), *xs)
    nested = lambda xs: rowwise([rowwise(row) for row in xs])
    f = jax.vmap(jax.vmap(_value_and_pull(run), (inner, 0)), (outer, 0))
    got = jax.jit(f)(*as_jax((together, nested(cts))))
    pairs = [list(zip(a, b, strict=True)) for a, b in zip(grid, cts, strict=True)]
    want = [[(_solved(call, x), call.gradients(x, c)) for x, c in row] for row in pairs]
    return [(got, nested(want))]


def scanned(call: Call, rng: np.random.Generator, run: Run) -> Pairs:
    """`scan` over stacked leaves beside shared ones, or `lax.map` in batches."""
    variants, together, axes = _variants(call, rng, n := int(rng.integers(1, 4)))
    front = lambda axis, x: x if axis is None else np.moveaxis(x, axis, 0)
    together = jax.tree.map(front, axes, together, is_leaf=lambda x: x is None)
    cts = [call.cotangents(rng) for _ in range(n)]
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *cts)
    way, leaves = int(rng.integers(4)), jax.tree.leaves(axes, is_leaf=lambda x: x is None)
    body = jax.checkpoint(run) if way == 1 else run
    # JAX cannot add up gradients in a scan that is not rolled where axes of a mesh are explicit.
    unroll = 2 if way == 3 and not _has_explicit_axes() else 1

    def f(values: Values) -> Any:
        flat, tree = jax.tree.flatten(values)
        moving = [x for x, axis in zip(flat, leaves, strict=True) if axis is not None]

        def one(moving: list[Any]) -> Any:
            own = iter(moving)
            each = [x if axis is None else next(own) for x, axis in zip(flat, leaves, strict=True)]
            return body(jax.tree.unflatten(tree, each))

        if way == 2:
            return jax.lax.map(one, moving, batch_size=2)
        return jax.lax.scan(lambda c, x: (c, one(x)), None, moving, unroll=unroll)[1]

    both = jax.jit(_value_and_pull(f))(*as_jax((together, stacked)))
    each = jax.tree.map(lambda *xs: np.stack(xs), *[_solved(call, x) for x in variants])
    grads = [call.gradients(x, c) for x, c in zip(variants, cts, strict=True)]
    axes = jax.tree.map(lambda a: None if a is None else 0, axes[0], is_leaf=lambda x: x is None)
    return [(both, (each, _added(axes, grads)))]


def layers(call: Call, rng: np.random.Generator, run: Run) -> Pairs:
    """Calls one after the other by `scan`: each adds what it finds to the queries of the next."""
    n, z = 3, call.sizes
    variants = [call.values(rng) for _ in range(n)]
    together = jax.tree.map(lambda *xs: np.stack(xs), *variants)
    mix = widened((rng.standard_normal((z.v, z.d)) / np.sqrt(z.v)).astype(call.dtype))
    ct, remat = call.cotangents(rng)[0], bool(rng.integers(2))
    last = rng.standard_normal((*z.lead, z.t, z.heads, z.d)).astype(call.dtype)

    def f(values: Values) -> Any:
        def step(query: Any, values: Values) -> Any:
            out, _ = run(({**values[0], "query": query}, values[1]))
            return query + out @ mix.astype(query.dtype), out

        step = jax.checkpoint(step) if remat else step
        first = jax.tree.map(lambda x: x[0], values[0]["query"])
        return jax.lax.scan(step, first, values)

    stacked = np.stack([ct] * n)
    both = jax.jit(_value_and_pull(f))(*as_jax((together, (last, stacked))))
    query, found, outs = variants[0][0]["query"], [], []
    for floats, others in variants:
        values = ({**floats, "query": query}, others)
        found.append(values)
        outs.append(call.solve(values).output)
        query = widened(query) + outs[-1] @ mix
    g_query, grads = last, []
    for values in reversed(found):
        cts = widened(ct) + widened(g_query) @ mix.T, np.zeros((*z.lead, z.t, z.heads))
        grads.insert(0, call.gradients(values, cts))
        g_query = g_query + grads[0]["query"]
    want = jax.tree.map(lambda *xs: np.stack(xs), *grads)
    want["query"] = np.zeros_like(want["query"])
    want["query"][0] = g_query
    return [(both, ((query, np.stack(outs)), want))]


def kept(call: Call, rng: np.random.Generator, run: Run) -> Pairs:
    """Under `jax.checkpoint`, with one of its policies."""
    policies = (
        POLICIES.nothing_saveable,
        POLICIES.everything_saveable,
        POLICIES.dots_saveable,
        POLICIES.dots_with_no_batch_dims_saveable,
        POLICIES.save_only_these_names("attention_output"),
        POLICIES.save_anything_except_these_names("attention_output"),
    )
    policy = policies[int(rng.integers(len(policies)))]
    again = bool(rng.integers(2))

    def body(values: Values) -> Any:
        out = jax.checkpoint(run, policy=policy)(values)
        return jax.tree.map(lambda x: x * 1, out)

    return gradient(call, rng, jax.checkpoint(body) if again else body)


def chosen(call: Call, rng: np.random.Generator, run: Run) -> Pairs:
    """In a branch of `cond`, whose predicate is traced, and mapped."""
    variants = [call.values(rng) for _ in range(2)]
    cts = [call.cotangents(rng) for _ in range(2)]
    stack = lambda xs: jax.tree.map(lambda *ys: np.stack(ys), *xs)
    flags = np.asarray([True, False])

    def either(flag: Any, values: Values, cts: Any) -> Any:
        def f(floats: Any) -> Any:
            other = lambda x: jax.tree.map(jnp.zeros_like, run(x))
            out, lse = jax.lax.cond(flag, run, other, (floats, values[1]))
            return out, jnp.where(jnp.isfinite(lse), lse, 0)

        outs, pull = jax.vjp(f, values[0])
        return outs, pull(cts)[0]

    f = lambda *xs: jax.lax.map(lambda x: either(*x), xs)
    # JAX cannot differentiate a mapped `cond` around `auto_axes`, in which explicit axes are left.
    if rng.integers(2) and not _has_explicit_axes():
        f = jax.vmap(either)
    got = jax.jit(f)(flags, *as_jax((stack(variants), stack(cts))))
    out, lse = _solved(call, variants[0])
    want = (out, np.where(np.isfinite(lse), lse, 0)), call.gradients(variants[0], cts[0])
    return [(got, stack([want, jax.tree.map(np.zeros_like, want)]))]


def jacobian(call: Call, rng: np.random.Generator, run: Run) -> Pairs:
    """`jacrev` and `jacfwd`, which map cotangents and tangents over what is not mapped."""
    values = call.values(rng)
    name = ("query", "key_", "value")[int(rng.integers(3))]
    u = call.cotangents(rng)[0]
    direction = rng.standard_normal(values[0][name].shape).astype(call.dtype)

    def program(values: Values) -> Any:
        floats, others = values
        f = lambda x: run(({**floats, name: x}, others))[0]
        return jax.jacrev(f)(floats[name]), jax.jacfwd(f)(floats[name])

    found = jax.jit(program)(as_jax(values))
    zero = jax.tree.map(np.zeros_like, values[0])
    way = moved(values, {**zero, name: direction})
    dot = _solved(call, way)[0].imag / STEP
    pulled = call.gradients(values, (u, np.zeros(u.shape[:-1])))[name]
    u, direction = widened(u), widened(direction)
    pairs: Pairs = []
    for x in found:
        x = np.asarray(x, np.float64)
        pairs += [(np.tensordot(x, direction, direction.ndim), dot)]
        pairs += [(np.tensordot(u, x, u.ndim), pulled)]
    return pairs


TRANSFORMS = {
    f.__name__: f
    for f in (gradient, eager, forward_mode, second_order, mapped, mapped_twice, scanned)
    + (layers, kept, chosen, jacobian)
}
