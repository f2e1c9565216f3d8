"""Lists of keys on an automatic mesh that shards batch and heads: each device folds its own, no list
and no gradient travels, and values and gradients are within the bound of the oracle.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from matrix import bound, oracle_dropout, oracle_masks as om
from matrix.oracle import Problem

from eqattn import (
    ALiBi,
    attention,
    AttentionMetadata,
    Blockwise,
    Causal,
    MaskFn,
    Ragged,
    Ring,
    ScoreFn,
    Selected,
    SlidingWindow,
    Tree,
)
from eqattn.scores import Operand


B, T, S, H, K, D = 4, 64, 96, 4, 2, 8
RATE, SCALE = 0.25, 0.3
HEADS = P("dp", None, "tp")
DROPPING = jax.random.key(7)
COLLECTIVES = "all-gather", "all-to-all", "collective-permute", "reduce-scatter"


def mesh_of():
    return jax.make_mesh((4, 2, 1), ("dp", "tp", "sp"), axis_types=(AxisType.Auto,) * 3)


def by_pair(shown):
    """A mask of `b`, `h` and `k` as the oracle's array."""
    b, h = np.arange(B)[:, None, None, None], np.arange(H)[:, None, None]
    return shown(b, h, None, np.arange(S))


some = lambda b, h, q, k: (k + b + 3 * h) % 5 != 0
window = om.window(T, S, 20, 0, 0, 0)
# The axes of a list (batch, heads, the sizes of its blocks and its entries), what it is combined with
# for us and for the oracle, the strategy, and whether all else that the call reads is narrow.
CASES = {
    "per head": ((B, H, 1, 1, 5), lambda x: x & MaskFn(some), lambda x: x & by_pair(some), Blockwise, False),
    "of blocks": ((B, K, 16, 32, 2), lambda x: x | SlidingWindow(20, 0), lambda x: x | window, Blockwise, False),
    "for all": ((1, 1, 1, 1, 7), lambda x: x, lambda x: x, Ragged, False),
    "narrow": ((B, K, 4, 1, 9), lambda x: x | SlidingWindow(20, 0), lambda x: x | window, Ragged, True),
    "per batch": ((B, 1, 1, 1, 5), lambda x: x & MaskFn(some), lambda x: x & by_pair(some), Ring, False),
}  # fmt: skip


def arrays_of(narrow):
    """The arrays that are differentiated, and how they are sharded. `table` holds a number for each
    batch element, head and key, that a `ScoreFn` looks up by their indices.
    """
    rng = np.random.default_rng(3)
    normal = lambda *shape: rng.standard_normal(shape)
    dtype = jnp.bfloat16 if narrow else jnp.float32
    as_read = lambda x: jnp.asarray(x, dtype)
    arrays = dict(q=normal(B, T, H, D), k=normal(B, S, K, D), v=normal(B, S, K, D))
    arrays = {name: as_read(x) for name, x in arrays.items()}
    arrays["slopes"] = as_read(rng.uniform(0.05, 0.3, H))
    arrays["scale"] = as_read(SCALE)
    arrays["table" if not narrow else "bias"] = as_read(
        normal(B, H, S) if not narrow else normal(1, 1, T, S)
    )
    return arrays  # fmt: skip


def call(arrays, indices, sizes, combined, strategy, **options):
    mask = combined(Selected(indices, *sizes))
    metadata = AttentionMetadata(softmax_scale=arrays["scale"], dropout_prob=RATE)
    scores = [ALiBi(arrays["slopes"])]
    if "table" in arrays:
        table = arrays["table"]
        scores.append(ScoreFn(lambda logit, b, h, q, k: logit + table[b, h, k]))
    out = attention(
        *(arrays[name] for name in "qkv"),
        strategy(metadata),
        mask=mask,
        bias=arrays.get("bias"),
        score=scores,
        key=DROPPING,
        return_logsumexp=True,
        **options,
    )
    return out.attention_outputs, out.logsumexp


def oracle_of(arrays, listed, sizes, combined):
    """The oracle's problem of the same call."""
    plain = {name: np.asarray(x).astype(np.float64) for name, x in arrays.items()}
    if "table" in plain:
        plain["bias"] = plain.pop("table")[:, :, None]
    seen = om.selected(T, S, listed, *sizes)
    seen = seen if seen.shape[1] in (1, H) else seen.repeat(H // K, 1)
    visible = np.broadcast_to(combined(seen), (B, H, T, S))
    keep = oracle_dropout.kept(DROPPING, B, H, *om.grid(T, S), RATE)
    constants = dict(mask=visible, distance=om.distance(T, S), keep=keep)
    return Problem(**plain, **constants, rate=oracle_dropout.dropped_share(RATE))


@pytest.mark.parametrize("name", ["of blocks"])
def test_each_device_folds_its_own_rows(name):
    (batch, heads, block_q, block_k, n), ours, theirs, strategy, narrow = CASES[name]
    sizes, rng = (block_q, block_k), np.random.default_rng(0)
    listed = rng.integers(-1, -(-S // block_k), (batch, heads, -(-T // block_q), n), np.int32)
    arrays, mesh = arrays_of(narrow), mesh_of()
    cts = [rng.standard_normal((B, T, H, *d)).astype(np.float32) for d in ((D,), ())]
    cts[0] = np.asarray(jnp.asarray(cts[0], arrays["q"].dtype).astype(jnp.float32))

    def loss(arrays, indices):
        out, lse = call(arrays, indices, sizes, ours, strategy)
        judged = jnp.where(jnp.isfinite(lse), lse, 0)
        return (out.astype(lse.dtype) * cts[0]).sum() + (judged * cts[1]).sum(), (out, lse)

    place = lambda x, *axes: jax.device_put(x, NamedSharding(mesh, P(*axes)))
    given = {n: place(x, *HEADS) if n in "qkv" else place(x) for n, x in arrays.items()}
    indices = place(listed, "dp" if batch > 1 else None, "tp" if heads > 1 else None)
    with jax.set_mesh(mesh):
        program = jax.jit(jax.grad(loss, has_aux=True)).lower(given, indices).compile()
        gradients, (out, lse) = program(given, indices)
    text = program.as_text()
    assert not [x for x in COLLECTIVES if f" {x}(" in text or f" {x}-start(" in text]
    for x in (out, lse, *(gradients[n] for n in "qkv")):
        assert x.sharding.spec[:3] == HEADS[:3], x.sharding

    problem = oracle_of(arrays, listed, sizes, theirs)
    precision = bound.precision_of(arrays["q"].dtype)
    wanted = bound.values(problem, precision)
    wanted |= {f"d{n}": x for n, x in bound.grads(problem, *cts, precision).items()}
    got = dict(out=out, lse=lse) | {f"d{n}": x for n, x in gradients.items()}
    if "dtable" in got:
        got["dbias"] = got.pop("dtable")[:, :, None]
    worst = {n: bound.excess(x, wanted[n]) for n, x in got.items()}
    assert set(worst) == {"out", "lse", *(f"d{n}" for n in problem.arguments())}
    assert max(worst.values()) <= 1, worst


def test_gradients_of_what_devices_share_are_summed_wide():
    """Each row adds 1 to the gradients of the logsumexp by a scale, by a number that a score reads
    and by one that it closes over. Four devices have 257, 257, 257 and 253 rows with a key. As
    bfloat16 has no 257, sums of each device in it would add up to 1020 or 1022, and not to 1024.
    """
    t, mesh = 257, mesh_of()
    indices = np.zeros((B, 1, t, 1), np.int32)
    indices[-1, :, 253:] = -1
    x = jax.device_put(jnp.ones((B, t, 1, 1), jnp.bfloat16), NamedSharding(mesh, P("dp")))

    def total(shared):
        read = ScoreFn(lambda logit, b, h, q, k, y: logit + y, (Operand(shared["read"], "h"),))
        closed = ScoreFn(lambda logit, b, h, q, k: logit + shared["closed"].astype(logit.dtype))
        strategy = Blockwise(AttentionMetadata(softmax_scale=shared["scale"]))
        given = dict(mask=Selected(indices), score=[read, closed], return_logsumexp=True)
        lse = attention(x, x, x, strategy, **given).logsumexp
        return jnp.where(jnp.isfinite(lse), lse, 0).sum()

    one = jnp.ones((), jnp.bfloat16)
    with jax.set_mesh(mesh):
        found = jax.jit(jax.grad(total))(dict(scale=one, read=one[None], closed=one))
    for name, gradient in found.items():
        assert float(gradient.sum()) == 1024, (name, gradient)


# The parents of a root and of its two branches, which have two tokens each.
BRANCHES = [-1, 0, 0, 1, 2]
WHERE = "explicit", "own", "own checked", "own of all axes", "vmap", "eager", "in a tree"


@pytest.mark.parametrize("where", ["mixed"])
def test_lists_wherever_axes_are(where):  # noqa: C901 (a switch over kinds)
    """Axes of explicit meshes, automatic ones beside an explicit one that shards nothing, a `jax.shard_map` of the caller's, over all axes or next to some that
    are automatic, calls for one batch element under `jax.vmap`, and calls outside of `jax.jit`.
    No list and no gradient of listed keys travels, but for axes that are automatic
    in a checked `jax.shard_map`.
    """
    rng, t = np.random.default_rng(1), 24
    kind = AxisType.Explicit if where == "explicit" else AxisType.Auto
    heads = None if where == "mixed" else "tp"
    sizes = (2, 2, 2) if where == "mixed" else (4, 2, 1)
    kinds = kind, kind, AxisType.Explicit if where == "mixed" else kind
    mesh = jax.make_mesh(sizes, ("dp", "tp", "sp"), axis_types=kinds)
    draw = lambda heads: jnp.asarray(rng.normal(size=(B, t, heads, D)), jnp.float32)
    specs = (P("dp", None, heads),) * 3 + (P("dp", heads), P("dp"), P("dp", None, heads))
    lists, shift = rng.integers(-1, t, (B, K, t, 5), np.int32), np.arange(B, dtype=np.int32)
    arrays = draw(H), draw(K), draw(K), jnp.asarray(lists), jnp.asarray(shift), draw(H)

    def call(q, k, v, lists, shift):
        mask, options = Selected(lists) & Causal(), dict(q_offset=shift)
        if where == "in a tree":
            mask, options = mask & Tree(BRANCHES, t - 5) & SlidingWindow(9, 0), {}
        return attention(q, k, v, Blockwise(), mask=mask, **options).attention_outputs

    def ours(*xs):
        if where == "vmap":
            return jax.vmap(call)(*xs)
        if not where.startswith("own"):
            return call(*xs)
        whole = where.endswith("all axes")
        given = dict(
            in_specs=specs[:5] if whole else P("dp"), out_specs=specs[0] if whole else P("dp")
        )
        given |= dict(axis_names={"dp", "tp", "sp"} if whole else {"dp"})
        return jax.shard_map(call, mesh=mesh, check_vma=where.endswith("checked"), **given)(*xs)

    def gradients(q, k, v, lists, shift, ct):
        loss = lambda *qkv: (ours(*qkv, lists, shift) * ct).sum()
        return jax.grad(loss, (0, 1, 2))(q, k, v)

    given = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)]
    with jax.set_mesh(mesh):
        if where == "eager":
            found = gradients(*given)
        else:
            program = jax.jit(gradients).lower(*given).compile()
            found, text = program(*given), program.as_text()
            moved = [x for x in COLLECTIVES[:3] if f" {x}(" in text or f" {x}-start(" in text]
            assert bool(moved) == (where == "own checked"), moved

    visible = om.selected(t, t, lists, 1, 1).repeat(H // K, 1)
    if where == "in a tree":
        # The tokens before the tree are a path to its roots.
        chain = [*range(-1, t - 6), *(t - 6 if x < 0 else t - 5 + x for x in BRANCHES)]
        q_at, k_at = om.tree_positions(t, t, chain, 0)
        visible = visible & om.tree(t, t, chain, 0) & (q_at - k_at <= 9)
    else:
        visible = visible & np.concatenate([om.causal(t, t, q_offset=x) for x in shift])
    plain = [np.asarray(x).astype(np.float64) for x in (*arrays[:3], arrays[-1])]
    problem = Problem(*plain[:3], scale=D**-0.5, mask=visible)
    wanted = bound.grads(problem, plain[3], np.zeros((B, t, H)), bound.precision_of(jnp.float32))
    worst = {n: bound.excess(x, wanted[n]) for n, x in zip("qkv", found, strict=True)}
    assert max(worst.values()) <= 1, worst
