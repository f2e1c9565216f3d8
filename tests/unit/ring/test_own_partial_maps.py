"""Maps over some axes of a mesh while others stay automatic: those of the caller, and our own."""

import contextlib
import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from eqattn import (
    AllGather,
    attention,
    AttentionMetadata as Metadata,
    Blockwise,
    Causal,
    Ragged,
    Ring,
    ScoreFn,
    Selected,
    Ulysses,
)
from eqattn.scores import AbstractScore


RNG = np.random.default_rng(0)
Q, K, V = RNG.normal(size=(3, 8, 16, 4, 4))
TABLE = RNG.normal(size=(8, 4))
LISTS = np.argsort(RNG.normal(size=(8, 1, 16, 16)), -1)[..., :5].astype(np.int32)
DISTANCE = np.arange(16, dtype=np.int32)[:, None] - np.arange(16, dtype=np.int32)


class OfTable(AbstractScore):
    """Adds `table[clip(q - k, 0, 7), h]`, which is no operand."""

    table: jax.Array

    def operands(self):
        return ()

    def transform(self, logit, b, h, q, k):
        return logit + self.table[jnp.clip(q - k, 0, 7), h]


def closing(table):
    """A function that closes over an array, and calls one with a rule for derivatives of its own."""
    return ScoreFn(lambda z, b, h, q, k: z - jax.nn.relu(table[0, h]) * abs(q - k).astype(z.dtype))


# Each score, and the logits that are plainly added.
SCORES = {
    "none": (lambda table: None, lambda table: 0.0),
    "module": (OfTable, lambda table: jnp.moveaxis(table[np.clip(DISTANCE, 0, 7)], -1, 0)[None]),
    "closure": (
        closing,
        lambda table: -jax.nn.relu(table[0])[None, :, None, None] * abs(1.0 * DISTANCE)[None, None],
    ),
}
MASKS = {
    "causal": (lambda lists: Causal(), DISTANCE >= 0),
    "listed": (Selected, (LISTS[..., None] == np.arange(16)).any(-2)),
}
# Each strategy with the axis that is manual, and whether it may be called where types are checked.
STRATEGIES = {
    "gathers": (AllGather(axis_name="sp"), P(None, "sp"), True),
    "kernels": (Blockwise(Metadata(platform="interpret")), P("dp"), False),
    "rows": (Blockwise(), P("dp"), True),
    "shards of keys": (Ragged(axis_name="tp"), P("dp"), False),
}
CASES = [
    (name, mask, check)
    for name, (_, _, checkable) in STRATEGIES.items()
    for mask in MASKS
    for check in (False, True)
    if checkable >= check and (name, mask) not in [("kernels", "listed"), ("gathers", "listed")]
]


def plain(q, k, v, table, added, visible):
    logits = jnp.einsum("bthd,bshd->bhts", q, k) / 2 + added(table)
    weights = jax.nn.softmax(jnp.where(np.broadcast_to(visible, logits.shape), logits, -jnp.inf))
    return jnp.einsum("bhts,bshd->bthd", weights, v)


def results(fn, *arrays):
    loss = lambda *xs: jnp.sum(jnp.sin(fn(*xs)))
    return jax.tree.leaves(jax.jit(jax.value_and_grad(loss, range(4)))(*arrays))


@pytest.mark.parametrize(
    "name, mask, check, score",
    [
        ("gathers", "causal", True, "closure"),
        ("rows", "listed", True, "module"),
    ],
)
def test_other_axes_stay_automatic(name, mask, check, score):
    strategy, spec, _ = STRATEGIES[name]
    axis = next(x for x in spec if x is not None)
    mesh = jax.make_mesh((4, 2), (axis, "tp"), axis_types=(AxisType.Auto,) * 2)
    (make, added), (masked, visible) = SCORES[score], MASKS[mask]

    def call(q, k, v, table, lists):
        how = dict(score=make(table), mask=masked(lists))
        return attention(q, k, v, strategy, **how).attention_outputs

    mine = jax.shard_map(
        call,
        mesh=mesh,
        in_specs=(spec,) * 3 + (P(), P() if axis == "sp" else spec),
        out_specs=spec,
        axis_names={axis},
        check_vma=check,
    )
    want = results(ft.partial(plain, added=added, visible=visible), Q, K, V, TABLE)
    narrow = name == "kernels"  # Interpreted kernels compute in float32.
    with jax.enable_x64(False) if narrow else contextlib.nullcontext():
        got = results(lambda *xs: mine(*xs, LISTS), Q, K, V, TABLE)
    for x, y in zip(got, want):
        np.testing.assert_allclose(x, y, atol=1e-4 if narrow else 1e-11, rtol=0)


SHARDED = {"ring": Ring(), "ulysses": Ulysses(), "ragged": Ragged(axis_name="sp")}


@pytest.mark.parametrize("name, score", [("ring", "closure")])
def test_a_table_is_sharded_over_the_axis_of_heads(name, score):
    """XLA ended the process."""
    mesh = jax.make_mesh((2, 2, 2), ("dp", "sp", "tp"), axis_types=(AxisType.Auto,) * 3)
    (make, added), (masked, visible) = SCORES[score], MASKS["causal"]

    def call(q, k, v, table):
        how = dict(score=make(table), mask=masked(None))
        return attention(q, k, v, SHARDED[name], **how).attention_outputs

    specs = [P("dp", "sp", "tp")] * 3 + [P(None, "tp")]
    arrays = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip((Q, K, V, TABLE), specs)]
    with jax.set_mesh(mesh):
        got = results(call, *arrays)
    want = results(ft.partial(plain, added=added, visible=visible), Q, K, V, TABLE)
    for x, y in zip(got, want):
        np.testing.assert_allclose(x, y, atol=1e-11, rtol=0)


class Twice(AbstractScore):
    """Holds the same array under two names."""

    first: jax.Array
    second: jax.Array

    def operands(self):
        return ()

    def transform(self, logit, b, h, q, k):
        return logit * self.first[0, h] + self.second[1, h]


def test_an_array_that_a_score_has_twice():
    mesh = jax.make_mesh((4, 2), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    kernels = Blockwise(Metadata(platform="interpret"))

    def call(q, k, v, table):
        return attention(q, k, v, kernels, score=Twice(table, table)).attention_outputs

    mine = jax.shard_map(
        call,
        mesh=mesh,
        in_specs=(P("dp"),) * 3 + (P(),),
        out_specs=P("dp"),
        axis_names={"dp"},
        check_vma=False,
    )

    def by_hand(q, k, v, table):
        logits = jnp.einsum("bthd,bshd->bhts", q, k) / 2
        logits = logits * table[0][None, :, None, None] + table[1][None, :, None, None]
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits), v)

    with jax.enable_x64(False):
        got = results(mine, Q, K, V, TABLE)
    for x, y in zip(got, results(by_hand, Q, K, V, TABLE)):
        np.testing.assert_allclose(x, y, atol=1e-4, rtol=0)
