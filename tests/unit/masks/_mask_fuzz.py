"""Random masks, as Python source, and what a block table must say of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

from eqattn.masks._function import MaskFn
from eqattn.masks._intervals.classify import classify


INTS = ["int8", "int16", "int32", "uint8", "uint16", "uint32"]
FLOATS = ["float32", "float16", "bfloat16"]
WIDE = {"int": ["int64", "uint64"], "float": ["float64"]}
EXTREME_FLOATS = [0.0, -0.0, 0.5, -1.5, 3.0, 100.0, 1e-40, 1e-7, 3e38, -3e38, np.inf, np.nan]


def floor_divide(x, n):  # a namesake of the one in jnp
    return jnp.where(n > x, x, n)


def remainder(x, n):
    return x


custom_jvp = jax.custom_jvp(lambda x: x)
custom_jvp.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
custom_vjp = jax.custom_vjp(lambda x: x)
custom_vjp.defvjp(lambda x: (x, None), lambda _, g: (g,))

NAMES = dict(
    jax=jax,
    jnp=jnp,
    lax=lax,
    np=np,
    inf=np.inf,
    nan=np.nan,
    namesake_divide=jax.jit(floor_divide),
    namesake_mod=jax.jit(remainder),
    custom_jvp=custom_jvp,
    custom_vjp=custom_vjp,
)


def block_classes(array, heads, kv_heads, block_q, block_k):
    """The classes of `[B, H, T, S]`, by looking at every pair."""
    b, _, t, s = array.shape
    rows, cols = -(-t // block_q), -(-s // block_k)
    out = np.empty((b, kv_heads, rows, cols), np.int8)
    group = heads // kv_heads
    for g in range(kv_heads):
        for r in range(rows):
            for c in range(cols):
                block = array[
                    :,
                    g * group : (g + 1) * group,
                    r * block_q : (r + 1) * block_q,
                    c * block_k : (c + 1) * block_k,
                ]
                some, every = block.any((1, 2, 3)), block.all((1, 2, 3))
                out[:, g, r, c] = some.astype(np.int8) + every.astype(np.int8)
    return out


@st.composite
def masks(draw, wide=False):  # noqa: C901 (a switch over kinds)
    """`(source, row_ids, col_ids, tables, q_positions, kv_positions)`."""
    ints = INTS + (WIDE["int"] if wide else [])
    floats = FLOATS + (WIDE["float"] if wide else [])
    t, s = 5, 6  # fixed, so that eager evaluation finds its operations compiled
    seed = draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)

    def integers(dtype, shape):
        info = np.iinfo(dtype)
        style = draw(st.integers(0, 3))
        if style == 0:
            return np.sort(rng.integers(0, 5, shape), -1).astype(dtype)
        pool = [0, 1, 2, 3, info.max, info.max - 1, info.min, info.max // 2]
        pool += [-1, -2, info.min + 1] if info.min else [7]
        if style == 1:
            return np.sort(rng.choice(np.array(pool, dtype), shape), -1)
        return rng.choice(np.array(pool[: 4 + 2 * style], dtype), shape)

    def reals(dtype, shape):
        pool = EXTREME_FLOATS if draw(st.booleans()) else EXTREME_FLOATS[:8]
        return rng.choice(np.array(pool), shape).astype(jnp.dtype(dtype))

    names = {"int32": ["q", "k", "b", "h"]}
    row_ids, col_ids, tables = [], [], []
    for pool, n, prefix in ((row_ids, t, "r"), (col_ids, s, "c")):
        for i in range(draw(st.integers(0, 2))):
            dtype = draw(st.sampled_from([*ints, *floats, "bool"]))
            shape = (2, n)
            if dtype == "bool":
                x = rng.integers(0, 2, shape).astype(bool)
            else:
                x = (integers if dtype in ints else reals)(dtype, shape)
            names.setdefault(dtype, []).append(f"{prefix}{i}")
            pool.append(x)
    for i in range(draw(st.integers(0, 2))):
        shape = draw(st.sampled_from([(2,), (5,), (9,), (2, 6)]))
        tables.append(integers("int32", shape))

    def literal(dtype):
        if dtype == "bool":
            return f"np.bool_({draw(st.booleans())})"
        if dtype in floats:
            value = draw(st.sampled_from(EXTREME_FLOATS))
            return f"np.array({value!r}).astype(jnp.dtype('{dtype}'))[()]".replace("np.float64", "")
        info = np.iinfo(dtype)
        low = max(info.min, -3)
        value = draw(st.integers(low, 9) | st.sampled_from([info.min, info.max, info.max // 3]))
        return f"np.{dtype}({value})"

    def expression(dtype, depth):  # noqa: C901 (a switch over kinds)
        sub = lambda d=dtype: expression(d, depth - 1)
        other = lambda pool: draw(st.sampled_from(pool))
        if depth <= 0 or draw(st.integers(0, 9)) == 0:
            known = names.get(dtype, [])
            if known and draw(st.integers(0, 3)):
                return other(known)
            return literal(dtype)
        wrap = draw(st.integers(0, 40))
        if wrap < 4:
            f = ["jax.jit(lambda z: z)", "jax.checkpoint(lambda z: z)", "custom_jvp", "custom_vjp"]
            x = sub()
            return x if dtype not in floats and wrap > 1 else f"{f[wrap]}(jnp.asarray({x}))"
        if wrap == 4:
            branches = ", ".join(f"lambda: jnp.asarray({sub()})" for _ in range(2))
            return f"lax.cond({sub('bool')}, {branches})"
        if wrap == 5:
            branches = ", ".join(f"lambda: jnp.asarray({sub()})" for _ in range(3))
            return f"lax.switch({sub('int32')}, [{branches}])"
        if wrap < 9:
            return f"jnp.where({sub('bool')}, {sub()}, {sub()})"
        if wrap == 9:
            cases = ", ".join(f"jnp.asarray({sub()})" for _ in range(3))
            which = f"lax.clamp(np.int32(0), {sub('int32')}, np.int32(2))"
            return f"lax.select_n(jnp.asarray({which}), {cases})"
        if wrap == 10:
            return f"jnp.stack([{sub()}, {sub()}])[{draw(st.integers(0, 1))}]"
        if wrap == 11:
            return f"jnp.max(jnp.concatenate([jnp.atleast_1d({sub()}), jnp.full((2,), {sub()})]))"
        if dtype == "bool":
            choice = draw(st.integers(0, 9))
            if choice < 5:
                d = other([*ints, *floats, "int32", "int32", "int32"])
                op = other(["<", "<=", ">", ">=", "==", "!="])
                return f"(jnp.asarray({sub(d)}) {op} jnp.asarray({sub(d)}))"
            if choice < 8:
                return f"({sub()} {other(['&', '|', '^', '==', '!='])} {sub()})"
            if choice == 8:
                return f"jnp.logical_not({sub()})"
            d = other([*ints, *floats])
            f = other(["jnp.asarray({}).astype(bool)", "jnp.isnan({})", "jnp.isin({}, {})"])
            if "isin" in f:
                return f"jnp.any(jnp.stack([{sub()}, {sub()}]))"
            return f.format(sub(d if "isnan" not in f else other(floats)))
        if draw(st.integers(0, 7)) == 0:
            d = other([*ints, *floats, "bool"])
            # `+ 0 * q`: a constant's cast would be folded by NumPy, which is not what XLA gives
            zero = f" + jnp.asarray(q * 0).astype(jnp.dtype('{d}'))" if d in floats else ""
            return f"(jnp.asarray({sub(d)}){zero}).astype(jnp.dtype('{dtype}'))"
        if dtype in floats:
            if draw(st.integers(0, 2)):
                return f"(jnp.asarray({sub()}) {other(['+', '-', '*', '/'])} {sub()})"
            f = ["-", "jnp.abs", "jnp.floor", "jnp.ceil", "jnp.sin", "jnp.square", "jnp.sign"]
            f += ["jnp.exp", "jnp.sqrt", "lax.round"]
            if draw(st.booleans()):
                return (
                    f"jnp.{other(['maximum', 'minimum', 'mod', 'floor_divide'])}({sub()}, {sub()})"
                )
            return f"{other(f)}(jnp.asarray({sub()}))"
        choice = draw(st.integers(0, 13))
        if choice < 5:
            return f"(jnp.asarray({sub()}) {other(['+', '-', '*', '&', '|', '^'])} {sub()})"
        if choice < 7:
            f = ["jnp.maximum", "jnp.minimum", "namesake_divide", "namesake_mod"]
            return f"{other(f)}(jnp.asarray({sub()}), {sub()})"
        if choice < 9:
            n = literal(dtype) if draw(st.integers(0, 3)) else sub()
            n = f"{n} | np.{dtype}(1)"  # XLA:CPU dies folding a division by zero
            f = ["jnp.floor_divide", "jnp.remainder", "lax.div", "lax.rem"]
            return f"{other(f)}(jnp.asarray({sub()}), jnp.asarray({n}))"
        if choice == 9:
            n = f"np.{dtype}({draw(st.integers(0, 9))})" if draw(st.integers(0, 3)) else sub()
            f = ["lax.shift_left", "lax.shift_right_logical", "lax.shift_right_arithmetic"]
            return f"{other(f)}(jnp.asarray({sub()}), jnp.asarray({n}))"
        if choice == 10:
            return f"jnp.clip({sub()}, {sub()}, {sub()})"
        if choice == 11:
            f = ["-", "~", "jnp.abs", "jnp.sign", "jnp.square", "lax.population_count"]
            return f"{other([*f, 'cube'])}(jnp.asarray({sub()}))".replace(
                "cube", "(lambda z: z**3)"
            )
        if choice == 12 and dtype == "int32" and tables:
            i = draw(st.integers(0, len(tables) - 1))
            index = "int32" if draw(st.booleans()) else other(ints)
            x = f"jnp.asarray({sub(index)})"
            mode = other(["", "fill", "clip", "drop", "promise_in_bounds", "take", "dynamic"])
            if tables[i].ndim == 2:
                return f"t{i}[jnp.asarray({sub()}), jnp.asarray({sub()})]"
            if mode == "":
                return f"t{i}[{x}]"
            if mode == "take":
                return f"jnp.take(t{i}, {x}, mode='{other(['clip', 'fill', 'wrap'])}')"
            if mode == "dynamic":
                return f"lax.dynamic_slice(t{i}, ({x},), (1,))[0]"
            if mode == "promise_in_bounds":
                x = f"jnp.clip({x}, 0, 1)"
            return f"t{i}.at[{x}].get(mode='{mode}')"
        return sub()

    source = expression("bool", draw(st.integers(1, 5)))
    q = np.arange(t, dtype=np.int32)[None] + draw(st.sampled_from([0, 0, 0, 5, 1000]))
    k = np.arange(s, dtype=np.int32)[None]
    if draw(st.integers(0, 3)) == 0:
        q, k = integers("int32", (2, t)), integers("int32", (1, s))
    return source, row_ids, col_ids, tables, q.astype(np.int32), k


def check_sound(case, block_q, block_k, traced):
    """A table never calls a block empty or full that is not."""
    source, row_ids, col_ids, tables, q, k = case
    heads, kv_heads = 4, 2
    names = ["b", "h", "q", "k", *(f"r{i}" for i in range(len(row_ids)))]
    names += [f"c{i}" for i in range(len(col_ids))]

    def mask_of(rows, cols, arrays):
        env = {**NAMES, **{f"t{i}": jnp.asarray(x) for i, x in enumerate(arrays)}}
        fn = eval(f"lambda {', '.join(names)}: jnp.asarray({source})", env)
        return MaskFn(fn, tuple(rows), tuple(cols))

    sizes: dict[str, Any] = dict(batch_shape=(2,), heads=heads)

    def table(q, k, rows, cols, arrays):
        return classify(
            mask_of(rows, cols, arrays),
            kv_heads=kv_heads,
            q_positions=q,
            kv_positions=k,
            block_q=block_q,
            block_k=block_k,
            **sizes,
        )

    def evaluate(q, k, rows, cols, arrays):
        mask = mask_of(rows, cols, arrays)
        return mask.as_array(q.shape[-1], k.shape[-1], q_positions=q, kv_positions=k, **sizes)

    args = (q, k, row_ids, col_ids, tables)
    got = [table(*args)]
    assert isinstance(got[0], np.ndarray)
    if traced:
        got.append(np.asarray(jax.jit(table)(*args)))
    near = max(np.abs(x.astype(np.int64)).max(initial=0) for x in (q, k)) < 2**30
    for fn in (evaluate, jax.jit(evaluate)) if near else (jax.jit(evaluate),):
        want = block_classes(np.asarray(fn(*args)), heads, kv_heads, block_q, block_k)
        for g in got:
            g = np.broadcast_to(g, want.shape)
            assert (want[g == 0] == 0).all(), (source, g, want)
            assert (want[g == 2] == 2).all(), (source, g, want)
    return got[0], want
