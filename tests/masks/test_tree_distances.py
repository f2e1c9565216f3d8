"""Distances next to a tree of drafts, whose positions are places and no depths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import oracle, oracle_masks as om

from eqattn import (
    ALiBi,
    attention,
    AttentionMetadata,
    BlockCausal,
    Blockwise,
    Causal,
    ChunkedCausal,
    Dense,
    KeyPadding,
    MaskFn,
    nn,
    PrefixLM,
    Ragged,
    ragged_attention,
    ScoreFn,
    Segments,
    SlidingWindow,
    T5Bias,
    Tree,
)
from eqattn.scores import Operand, SoftCap


BRANCHES = np.array([-1, 0, 0, 1, 2, 2], np.int32)  # depths 0, 1, 1, 2, 2, 2
FAR = {
    "SlidingWindow": (dict(mask=SlidingWindow(2, 0)), None),
    "a window within": (dict(mask=~(Causal() | SlidingWindow(None, 3))), "SlidingWindow"),
    "BlockCausal": (dict(mask=BlockCausal(4)), None),
    "ChunkedCausal": (dict(mask=ChunkedCausal(4)), None),
    "ALiBi": (dict(score=ALiBi([0.5])), None),
    "T5Bias": (dict(score=(SoftCap(3.0), T5Bias(jnp.zeros((8, 1))))), None),
}
NEAR = {
    "order": dict(mask=SlidingWindow(None, 0) & Causal() & PrefixLM(2)),
    "ids": dict(mask=Segments(np.zeros(10, np.int32)) & KeyPadding(9)),
    "a function": dict(mask=MaskFn(lambda b, h, q, k: k != 3)),
    "scores": dict(score=SoftCap(3.0), bias=jnp.ones((10, 10))),
}


def call_with(tree, given, strategy=None):
    q = jnp.ones((10, 1, 2))
    mask = tree & given["mask"] if "mask" in given else tree
    return attention(q, q, q, strategy, **{**given, "mask": mask}).attention_outputs


@pytest.mark.parametrize("name", FAR)
def test_distances_among_drafts_raise(name):
    given, says = FAR[name]
    tree, message = Tree(BRANCHES, 4), f"{says or name} would take distances .* Tree .*depths"
    for strategy in (None, Dense(AttentionMetadata()), Ragged()):
        with pytest.raises(ValueError, match=message):
            call_with(tree, given, strategy)
    mask = tree | given["mask"] if "mask" in given else tree
    assert "would take distances" in Blockwise().supports(**{**given, "mask": mask}).reason
    chain = Tree(np.arange(-1, 5), 4)
    want = call_with(Causal(), given)
    np.testing.assert_allclose(call_with(chain, given), want, atol=1e-6)
    with pytest.raises(ValueError, match=message):  # its parents are not known to be a chain
        jax.jit(lambda parents: call_with(Tree(parents, 4), given))(np.arange(-1, 5))
    packed = dict(mask=tree & given["mask"]) if "mask" in given else dict(mask=tree, **given)
    with pytest.raises(ValueError, match=message):
        q, k = jnp.ones((6, 1, 2)), jnp.ones((1, 10, 1, 2))
        ragged_attention(q, k, k, jnp.array([0, 6]), jnp.array([10]), Ragged(), **packed)


@pytest.mark.parametrize("name", NEAR)
def test_what_asks_for_no_distance_is_allowed_among_drafts(name):
    assert call_with(Tree(BRANCHES, 4), NEAR[name]).shape == (10, 1, 2)


def test_depths_given_explicitly_are_right_among_drafts():
    """The remedy of the message, against each branch alone, by the oracle."""
    rng, start, n = np.random.default_rng(0), 5, len(BRANCHES)
    t = start + n
    q, k, v = rng.normal(size=(3, 1, t, 1, 4))
    depth = np.array([0, 1, 1, 2, 2, 2])
    at = np.concatenate([np.arange(start), start + depth]).astype(np.int32)
    window = MaskFn(lambda b, h, q, k, i, j: i - j <= 2, (at,), (at,))
    fade = lambda logit, b, h, q, k, i, j: logit - 0.25 * abs(i - j).astype(logit.dtype)
    score = ScoreFn(fade, (Operand(at, "bt"), Operand(at, "bs")))
    arrays = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
    got = attention(*arrays, mask=Tree(BRANCHES, start) & window, score=score).attention_outputs
    for draft in range(n):
        branch = [draft]
        while BRANCHES[branch[0]] >= 0:
            branch.insert(0, BRANCHES[branch[0]])
        rows = [*range(start), *(start + i for i in branch)]
        size = len(rows)
        line = oracle.Problem(
            q[:, rows], k[:, rows], v[:, rows], scale=0.5,
            mask=om.causal(size, size, 0, 0) & om.window(size, size, 2, size),
            slopes=np.array([0.25]), distance=om.distance(size, size, 0),
        )  # fmt: skip
        want = oracle.forward(line).out[0, -1]
        np.testing.assert_allclose(got[0, start + draft], want, rtol=0, atol=2e-6)


def test_a_layer_with_rotary_positions():
    """It raises too; turned by depths in `process_heads`, each branch is as if it were alone."""
    x, start = jax.random.normal(jax.random.key(0), (10, 8)), 4
    tree = Tree(BRANCHES, start)
    plain = nn.MultiheadAttention(2, 8, key=jax.random.key(1))
    layer = nn.MultiheadAttention(2, 8, rotary=nn.Rotary(), key=jax.random.key(1))
    with pytest.raises(ValueError, match="Rotary would take distances .* rotary"):
        layer(x, mask=tree)
    with pytest.raises(ValueError, match="SlidingWindow would take distances"):
        nn.MultiheadAttention(2, 8, window=3, key=jax.random.key(1))(x, mask=tree)
    at = jnp.concatenate([jnp.arange(start), start + jnp.array([0, 1, 1, 2, 2, 2])])
    turn = lambda q, k, v: (nn.rotary(q, at), nn.rotary(k, at), v)
    got = plain(x, mask=tree, process_heads=turn)
    branch = jnp.array([0, 1, 2, 3, 4, 6, 9])  # the prefix, then drafts 0, 2 and 5
    want = layer(x[branch], mask="causal")
    np.testing.assert_allclose(got[branch], want, atol=2e-6)
    assert layer(x, mask=Tree(np.arange(-1, 5), start)).shape == (10, 8)
