"""The forward kernel that visits two heads in a step, which have the same pairs of blocks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _draw import normal
from _tpu_races import without_races
from matrix import bound, oracle, oracle_masks as om

from eqattn import attention, AttentionMetadata, Blockwise, Causal, Segments
from eqattn.kernels.tpu import _forward, _work_list


T, D, SIZE = 40, 8, 16


@pytest.fixture
def plans(monkeypatch):
    found, plan = [], _forward._plan

    def noted(*args):
        made = plan(*args)
        found.append(made[0])
        return made

    monkeypatch.setattr(_forward, "heads_abreast", lambda pairs, width: 2)
    monkeypatch.setattr(_forward, "_plan", noted)
    return found


def strategy(**kw) -> Any:
    fields = dict(platform="interpret", blocksize_q=SIZE, blocksize_k=SIZE)
    return Blockwise(AttentionMetadata(**fields, **kw))


STRATEGY = strategy()


def draw(heads=4, kv_heads=4, batch=2):
    shapes = (heads, D), (kv_heads, D), (kv_heads, D), (heads, D)
    return [normal(i, batch, T, *shape) for i, shape in enumerate(shapes)]


def problem_of(q, k, v, mask):
    q, k, v = (np.float64(x) for x in (q, k, v))
    return oracle.Problem(q, k, v, scale=D**-0.5, mask=mask)


def judged(found, problem, g=None):
    """Whether outputs, and gradients of the query, the key and the value, are within the bound."""
    precision = bound.precision_of(jnp.float32)
    want = {"out": bound.values(problem, precision)["out"]}
    if g is not None:
        b, t, h, _ = g.shape
        want |= bound.grads(problem, np.float64(g), np.zeros((b, t, h)), precision)
    worst = {n: bound.excess(np.asarray(x), want[n]) for n, x in found.items()}
    assert max(worst.values()) <= 1, worst


@pytest.mark.parametrize("turns, kv_heads", [(False, 4), (True, 4), (True, 2)])
def test_values_and_gradients(turns, kv_heads, plans, monkeypatch):
    """Both heads share positions, and each has its own bias and sink. Blocks of values are turned if
    they fill registers.
    """
    if turns:
        monkeypatch.setattr("eqattn.kernels.tpu._operands.LANES", 8)
    q, k, v, g = draw(4, kv_heads)
    bias, sinks = normal(7, 1, 4, T, T), jnp.arange(4.0)
    how = strategy(softmax_aux=sinks)

    @jax.jit
    def run(q, k, v, g):
        f = lambda q, k, v: attention(q, k, v, how, mask=Causal(), bias=bias).attention_outputs
        out, transpose = jax.vjp(f, q, k, v)
        return {"out": out} | dict(zip("qkv", transpose(g)))

    found = run(q, k, v, g)
    assert [p.grid.abreast for p in plans] == [2] and plans[0].early == turns
    problem = problem_of(q, k, v, om.causal(T, T))
    judged(found, problem.replace(bias=np.float64(bias), sinks=np.float64(sinks)), g)


@pytest.mark.parametrize("turns", [False, True])
def test_rows_of_each_batch_element(turns, plans, monkeypatch):
    """Lists that differ between batch elements, too long to be shared by all, and values that are
    not finite, of the first head of a step and of the second: each reaches the rows of its head that
    see it. They are found as values are turned, or a step later.
    """
    monkeypatch.setattr(_work_list, "SHORT", 4)
    if turns:
        monkeypatch.setattr("eqattn.kernels.tpu._operands.LANES", 8)
        monkeypatch.setattr("eqattn.kernels.tpu._sides.LANES", 8)
    ids = jnp.asarray(np.arange(2 * T).reshape(2, T) // 24)
    q, k, v, _ = draw()
    bad = v.at[1, 20, 2].set(jnp.nan).at[0, 30, 1].set(jnp.nan)
    f = lambda v: attention(q, k, v, STRATEGY, mask=Causal() & Segments(ids)).attention_outputs
    found, dirty = jax.jit(lambda: (f(v), f(bad)))()
    assert {(p.grid.abreast, p.grid.merged) for p in plans} == {(2, ())}
    assert {len(p.flags) for p in plans} == {int(turns)}
    shown = om.causal(T, T) & (ids[:, None, :, None] == ids[:, None, None, :])
    judged({"out": found}, problem_of(q, k, v, np.asarray(shown)))
    seen = np.zeros(found.shape[:3], bool)
    seen[1, :, 2] = np.asarray(shown)[1, 0, :, 20]
    seen[0, :, 1] = np.asarray(shown)[0, 0, :, 30]
    np.testing.assert_array_equal(np.isnan(dirty).any(-1), seen)
    np.testing.assert_array_equal(dirty[~seen], found[~seen])


def test_heads_that_have_no_neighbour(plans):
    """Three heads, and a table of pairs for each head, are visited one by one."""
    run = lambda q, k, v: attention(q, k, v, STRATEGY).attention_outputs
    jax.eval_shape(run, *draw(3, 3)[:3])
    jax.jit(run).lower(*draw(3, 3)[:3])
    jax.jit(run).lower(*draw(2, 1)[:3])  # one key head for both
    jax.jit(run).lower(*draw(2, 2)[:3])
    assert [p.grid.abreast for p in plans] == [1, 1, 2]


def test_races_and_memory_that_nothing_wrote(plans, monkeypatch):
    monkeypatch.setattr("eqattn.kernels.tpu._operands.LANES", 8)
    q, k, v, _ = draw(2, 2, 1)
    f = lambda q, k, v: attention(q, k, v, STRATEGY, mask=Causal()).attention_outputs
    got, count = without_races(f, q, k, v)
    assert count == 1 and plans[0].grid.abreast == 2 and plans[0].early
    want = oracle.forward(problem_of(q, k, v, om.causal(T, T)))
    np.testing.assert_allclose(got[0], want.out, rtol=0, atol=1e-5)
