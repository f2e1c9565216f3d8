"""Laws of exact attention, as properties. Each compares two ways of computing the same thing.

Where the two sides differ by rounding only, the yardstick is the oracle's error bound of the
problem (both sides lie within it, so they differ by at most twice that); where the law is bitwise,
equality is.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings, strategies as st
from matrix import bound, oracle, oracle_masks

import eqattn
from eqattn import Carry, masks as m


# Every new shape compiles: few examples of few sizes, and no deadline.
few = settings(max_examples=2, deadline=None, derandomize=True)
sizes = st.sampled_from([1, 7, 13])
blocks = st.sampled_from([(1, 1), (3, 5), (8, 2), (64, 64)])
strategy_names = st.sampled_from(["blockwise", "dense", "ragged"])
seeds = st.integers(0, 2**31 - 1)


def draw(seed, t, s, b=2, h=4, kv=2, d=8, dv=6):
    rng = np.random.default_rng(seed)
    shapes = ((b, t, h, d), (b, s, kv, d), (b, s, kv, dv))
    return tuple(jnp.asarray(rng.standard_normal(x).astype(np.float32)) for x in shapes)


def run(q, k, v, name="blockwise", block=(8, 8), *, return_carry=False, dropout_key=None, **call):
    fields = {n: call.pop(n) for n in ("softmax_scale", "softmax_aux", "dropout_prob") if n in call}
    metadata = eqattn.AttentionMetadata(
        runtime_dtype=q.dtype, blocksize_q=block[0], blocksize_k=block[1], **fields
    )
    impl = eqattn.AttentionRegistry.create(name, metadata)
    output = eqattn.attention(
        q, k, v, impl, return_logsumexp=True, return_carry=return_carry, key=dropout_key, **call
    )
    return output.carry if return_carry else (output.attention_outputs, output.logsumexp)


def problem_of(q, k, v, mask=None, **features):
    exact = [np.asarray(x, np.float64) for x in (q, k, v)]
    return oracle.Problem(*exact, scale=q.shape[-1] ** -0.5, mask=mask, **features)


def close(actual, expected, problem):
    """Both within the bound of one problem."""
    references = bound.values(problem, bound.precision_of(np.float32))
    for name, a, b in zip(("out", "lse"), actual, expected, strict=True):
        assert bound.excess(a, references[name]) <= 1, name
        assert bound.excess(b, references[name]) <= 1, name


def bitwise(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@few
@given(seeds, sizes, sizes, blocks, strategy_names)
def test_keys_may_be_permuted(seed, t, s, block, name):
    rng = np.random.default_rng(seed)
    q, k, v = draw(seed, t, s)
    visible = rng.random((2, 4, t, s)) < 0.6
    order = rng.permutation(s)
    shuffled = run(
        q, k[:, order], v[:, order], name, block, mask=m.Dense(jnp.asarray(visible[..., order]))
    )
    plain = run(q, k, v, name, block, mask=m.Dense(jnp.asarray(visible)))
    close(shuffled, plain, problem_of(q, k, v, visible))


@few
@given(seeds, sizes, sizes, blocks, st.data())
def test_keys_may_be_split_and_carries_merged(seed, t, s, block, data):
    q, k, v = draw(seed, t, s)
    visible = np.random.default_rng(seed).random((2, 4, t, s)) < 0.6
    cuts = [
        0,
        *sorted(data.draw(st.lists(st.sampled_from([0, s // 2, s]), min_size=1, max_size=3))),
        s,
    ]
    parts = [
        run(
            q,
            k[:, a:b],
            v[:, a:b],
            block=block,
            mask=m.Dense(jnp.asarray(visible[..., a:b])),
            return_carry=True,
        )
        for a, b in zip(cuts, cuts[1:], strict=False)
    ]
    merged = functools.reduce(
        Carry.merge, [parts[i] for i in data.draw(st.permutations(range(len(parts))))]
    )
    close(
        merged.finalise(),
        run(q, k, v, block=block, mask=m.Dense(jnp.asarray(visible))),
        problem_of(q, k, v, visible),
    )


@few
@given(seeds, sizes, sizes)
def test_merge_commutes_bitwise_and_empty_is_its_identity(seed, t, s):
    q, k, v = draw(seed, t, s)
    left = run(q, k, v, return_carry=True)
    right = run(q, k[:, ::-1], v, return_carry=True, mask=m.Causal(-1))
    bitwise(jax.tree.leaves(left.merge(right)), jax.tree.leaves(right.merge(left)))
    zeros = jnp.zeros_like
    empty = Carry(
        zeros(left.numerator), zeros(left.denominator), jnp.full_like(left.max_so_far, -jnp.inf)
    )
    bitwise(jax.tree.leaves(left.merge(empty)), jax.tree.leaves(left))


@few
@given(seeds, sizes, sizes, st.sampled_from([1, 6]), blocks, strategy_names)
def test_padding_changes_nothing(seed, t, s, extra, block, name):
    q, k, v = draw(seed, t, s)
    padded_k, padded_v = (
        jnp.pad(x, ((0, 0), (0, extra), (0, 0), (0, 0)), constant_values=jnp.nan) for x in (k, v)
    )
    padded = run(q, padded_k, padded_v, name, block, mask=m.KeyPadding(s))
    close(padded, run(q, k, v, name, block), problem_of(q, k, v))
    rows = jnp.pad(q, ((0, 0), (0, extra), (0, 0), (0, 0)))
    out, lse = run(rows, k, v, name, block)
    close((out[:, :t], lse[:, :t]), run(q, k, v, name, block), problem_of(q, k, v))


@few
@given(seeds, sizes, sizes, st.sampled_from([-64.0, -3.5, 0.25, 100.0]), strategy_names)
def test_a_constant_on_the_logits_only_moves_the_logsumexp(seed, t, s, shift, name):
    q, k, v = draw(seed, t, s)
    bias = jnp.full((1, 1, 1, 1), shift, jnp.float32)
    out, lse = run(q, k, v, name, bias=bias)
    moved = problem_of(q, k, v, bias=np.full((1, 1, 1, 1), shift))
    plain_out, plain_lse = run(q, k, v, name)
    references = bound.values(moved, bound.precision_of(np.float32))
    assert (
        bound.excess(out, references["out"]) <= 1
        and bound.excess(plain_out, references["out"]) <= 1
    )
    assert bound.excess(lse, references["lse"]) <= 1
    np.testing.assert_allclose(np.asarray(lse, np.float64) - shift, plain_lse, atol=2e-5, rtol=0)


@few
@given(seeds, sizes, sizes, blocks, strategy_names)
def test_an_unbounded_window_is_causal(seed, t, s, block, name):
    q, k, v = draw(seed, t, s)
    bitwise(
        run(q, k, v, name, block, mask=m.SlidingWindow(None, 0)),
        run(q, k, v, name, block, mask=m.Causal()),
    )
    bitwise(
        run(q, k, v, name, block, mask=m.SlidingWindow(t, 0)),
        run(q, k, v, name, block, mask=m.Causal()),
    )


@few
@given(seeds, sizes, sizes, st.sampled_from([1, 2, 4]), blocks, strategy_names)
def test_grouped_heads_are_repeated_heads(seed, t, s, kv, block, name):
    q, k, v = draw(seed, t, s, kv=kv)
    repeated = (jnp.repeat(x, 4 // kv, 2) for x in (k, v))
    mask = m.Causal()
    close(
        run(q, k, v, name, block, mask=mask),
        run(q, *repeated, name, block, mask=mask),
        problem_of(q, k, v, oracle_masks.causal(t, s)),
    )


@few
@given(seeds, sizes, sizes, blocks, st.sampled_from([0.1, 0.5, 0.9]))
def test_dropout_does_not_know_the_blocks(seed, t, s, block, rate):
    """Nor the strategy, and the bits are those that `dropout_mask` shows."""
    q, k, v = draw(seed, t, s)
    key = jax.random.key(seed)
    keep = np.asarray(eqattn.dropout_mask(key, (2,), 4, t, s, rate))
    one = run(q, k, v, "blockwise", block, dropout_prob=rate, dropout_key=key)
    other = run(q, k, v, "dense", dropout_prob=rate, dropout_key=key)
    close(one, other, problem_of(q, k, v, keep=keep, rate=rate))


@few
@given(seeds, sizes, sizes, st.sampled_from([2.0**-20, 0.5, 4.0, 2.0**30]), strategy_names)
def test_values_scaled_by_a_power_of_two_scale_the_output_bitwise(seed, t, s, factor, name):
    q, k, v = draw(seed, t, s)
    factor = jnp.float32(factor)
    out, lse = run(q, k, v, name)
    scaled, same = run(q, k, v * factor, name)
    bitwise((scaled, same), (out * factor, lse))


@few
@given(seeds, sizes, sizes, st.sampled_from([2.0**-8, 0.5, 4.0]), strategy_names)
def test_a_power_of_two_moves_freely_between_query_key_and_scale(seed, t, s, factor, name):
    q, k, v = draw(seed, t, s)
    plain = run(q, k, v, name, softmax_scale=0.375)
    bitwise(run(q * jnp.float32(factor), k, v, name, softmax_scale=0.375 / factor), plain)
    bitwise(run(q, k * jnp.float32(factor), v, name, softmax_scale=0.375 / factor), plain)


@few
@given(seeds, sizes, sizes, blocks)
def test_the_tangent_and_the_gradient_are_adjoint(seed, t, s, block):
    """<w, J x'> = <J^T w, x'>, up to the sum of both bounds."""
    q, k, v = draw(seed, t, s)
    dots = draw(seed + 1, t, s)
    out_shape = (*q.shape[:3], v.shape[-1])
    w = jnp.asarray(np.random.default_rng(seed).standard_normal(out_shape).astype(np.float32))

    def call(*x):
        return run(*x, block=block, mask=m.Causal())[0]

    _, forward = jax.jit(lambda *x: jax.jvp(call, x, dots))(q, k, v)
    gradients = jax.jit(lambda *x: jax.vjp(call, *x)[1](w))(q, k, v)
    wide = lambda x: np.asarray(x, np.float64)  # noqa: E731
    left = np.sum(wide(w) * wide(forward))
    right = sum(np.sum(wide(g) * wide(x)) for g, x in zip(gradients, dots, strict=True))
    problem, precision = (
        problem_of(q, k, v, oracle_masks.causal(t, s)),
        bound.precision_of(np.float32),
    )
    directions = dict(zip("qkv", map(wide, dots), strict=True))
    grads = bound.grads(problem, wide(w), np.zeros(out_shape[:-1]), precision)
    tangent = bound.tangents(problem, directions, precision)["out"]
    limit = np.sum(abs(wide(w)) * (tangent.error + 2.0**-24 * abs(tangent.primal)))
    limit += sum(
        np.sum(abs(directions[n]) * (g.error + 2.0**-24 * abs(g.primal)))
        for n, g in grads.items()
        if n in "qkv"
    )
    assert abs(left - right) <= limit


def test_whole_blocks_that_differ_by_batch_element_and_head():
    """Every block is empty or full for each of them, but not for all that one visit takes."""
    q, k, v = draw(0, 16, 16)
    mask = m.MaskFn(lambda b, h, i, j: (i // 8 == j // 8) == ((b == 0) & (h < 2)))
    b, h, i, j = np.ogrid[:2, :4, :16, :16]
    visible = (i // 8 == j // 8) == ((b == 0) & (h < 2))
    problem = problem_of(q, k, v, mask=visible)
    actual = run(q, k, v, mask=mask)
    close(actual, run(q, k, v, "dense", mask=mask), problem)
