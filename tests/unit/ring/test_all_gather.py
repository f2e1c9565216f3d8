"""`AllGather`: where it can be called, what it sends and keeps, and its errors. What it computes is
compared with the oracle in test_against_oracle.py and test_functions_and_operands.py.
"""

import collections
import functools as ft
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from eqattn import AllGather, attention, Blockwise, dropout_mask, masks as m, Zigzag

from .common import (
    attend,
    B,
    close,
    D,
    expected,
    gradient,
    H,
    K,
    k,
    mesh_of,
    q,
    raises,
    SP,
    strategy,
    T,
    V,
    v,
)


gathered = ft.partial(attend, cls=AllGather)


def test_eager_and_one_device():
    want = expected(lambda fn: fn)
    close(gathered(q, k, v, mesh=mesh_of(2)), want)
    close(gathered(q, k, v), want, 0)
    close(gathered(q, k, v, mesh=mesh_of(1)), want, 0)


def test_dropout_in_own_shard_map():
    """The very bits of the whole arrays, where batch and tokens are sharded."""
    kinds = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("dp", "sp"), axis_types=kinds)
    key, spec, layout = jax.random.key(3), P("dp", "sp"), Zigzag()

    def local(q, k, v):
        s = strategy(AllGather, dropout_prob=0.5, axis_name="sp", layout=layout)
        return attention(q, k, v, s, key=key).attention_outputs

    fn = jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=True)
    # All logits are equal, and a value says which key it is: what is kept can be read off.
    zeros = jnp.zeros((B, T, H, D))
    which = jnp.broadcast_to(jnp.eye(T)[None, :, None], (B, T, K, T))
    out = jax.jit(fn)(zeros, zeros[:, :, :K], layout.permute(which, 4))
    kept = layout.unpermute(out, 4).transpose(0, 2, 1, 3) > 0
    assert (np.asarray(kept) == np.asarray(dropout_mask(key, (B,), H, T, T, 0.5))).all()


def plain(q, k, v, mask=m.Causal(), **kwargs):
    s = strategy(AllGather, runtime_dtype=jnp.float32, **kwargs)
    return attention(q, k, v, s, mask=mask).attention_outputs.astype(jnp.float32)


def moved(program):
    """`(operation, dtype, numbers of its result) -> times` of the exchanges of a program."""
    names = "all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute"
    found = re.findall(rf"= \(?(\w+)\[([\d,]*)\]\S* ({names})(?:-start)?\(", program.as_text())
    size = lambda shape: int(np.prod([int(x) for x in shape.split(",") if x], dtype=int))
    return collections.Counter((name, dtype, size(shape)) for dtype, shape, name in found)


def compiled(mesh, spec, transform=lambda fn: fn):
    args = [jax.device_put(x.astype(jnp.float16), NamedSharding(mesh, spec)) for x in (q, k, v)]
    with jax.set_mesh(mesh):
        return jax.jit(transform(plain)).lower(*args).compile(), args


def test_what_is_sent():
    """Keys and values are gathered once, as they came: float16, with key heads only. With them goes
    which value vectors are not finite, and where keys are. Their gradients are summed in float32,
    and each device receives its part of the sum.
    """
    n = 4
    gathers = {("all-gather", "f16", B * T * K * size): 1 for size in (D, V, 1)}
    gathers["all-gather", "s32", T] = 1
    program, _ = compiled(mesh_of(n), SP)
    assert moved(program) == gathers
    program, _ = compiled(mesh_of(n), SP, gradient)
    found = moved(program)
    for size in (D, V):
        assert found.pop(("reduce-scatter", "f32", B * T * K * size // n)) == 1
        assert found.pop(("all-gather", "f16", B * T * K * size)) in (
            1,
            2,
        )  # 1 where XLA finds both
    assert not any(name != "all-gather" and size > 1 for name, _, size in found), found
    assert sum(size for _, _, size in found) <= 2 * (B * T * K + T) + 1, found


def test_what_is_sent_beside_other_axes():
    """Batch and heads stay sharded over their axes."""
    kinds = (AxisType.Auto,) * 3
    mesh = jax.make_mesh((2, 2, 2), ("dp", "tp", "sp"), axis_types=kinds)
    program, args = compiled(mesh, P("dp", "sp", "tp"))
    own = {("all-gather", "f16", B * T * K * size // 4): 1 for size in (D, V, 1)}
    assert moved(program) == own | {("all-gather", "s32", T): 1}
    assert program.output_shardings.spec[:3] == ("dp", "sp", "tp")
    one = [jnp.asarray(np.asarray(x)) for x in args]
    s = strategy(Blockwise, runtime_dtype=jnp.float32)
    close(program(*args), attention(*one, s, mask=m.Causal()).attention_outputs, 1e-5)


def test_nothing_that_grows_with_the_sequence_is_kept():
    """What the forward keeps for the backward is a device's own share: its queries, keys, values
    and rows of the Carry."""

    def kept(n):
        tokens = 8 * n
        args = [jnp.ones((1, tokens, heads, 4), jnp.float32) for heads in (2, 1, 1)]

        def local(q, k, v):
            s = strategy(AllGather, runtime_dtype=jnp.float32, axis_name="sp")
            return jax.vjp(
                lambda *xs: attention(*xs, s, mask=m.Causal()).attention_outputs, q, k, v
            )[1]

        shapes = []

        def sizes(q, k, v):
            shapes.extend(x.size for x in jax.tree.leaves(local(q, k, v)))
            return q

        fn = jax.shard_map(sizes, mesh=mesh_of(n), in_specs=(SP,) * 3, out_specs=SP)
        jax.eval_shape(fn, *args)
        return max(shapes)

    assert kept(2) == kept(8)


# Errors, each with its remedy.


def test_errors():
    fn = ft.partial(plain, layout=Zigzag(), mesh=mesh_of(4))
    raises("pad them to a multiple of 8", fn, *[x[:, :12] for x in (q, k, v)])
    raises("there is no mesh", ft.partial(gathered, axis_name="sp"), q, k, v)
    raises("no 'ring'", ft.partial(gathered, axis_name="ring", mesh=mesh_of(2)), q, k, v)
