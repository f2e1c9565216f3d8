"""The four modes of a server, each with the shardings of the metadata, against the oracle."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from matrix import oracle, oracle_masks as om

from eqattn import attention, AttentionMetadata, Causal, Ragged, RuntimeMode
from eqattn.cache import KVCache


B, T, CAPACITY, H, K, D = 2, 12, 16, 4, 2, 8
MESH = jax.make_mesh((2,), ("tp",), (AxisType.Auto,), devices=jax.devices()[:2])
COLLECTIVE = r"= (\S+) (?:all-gather|all-to-all|all-reduce|collective-permute)\S*\("


class Server:
    """Places what it is given as the metadata says for the mode of the call."""

    def __init__(self, strategy):
        self.metadata = AttentionMetadata(mesh=MESH, blocksize_q=4, blocksize_k=4)
        self.strategy, self.modes = strategy(self.metadata), []

    def __call__(self, q, k, v, cache=None, counts=None, insert=False):
        mode = self.strategy.get_mode(q, cache=cache, insert=insert)
        self.modes.append(mode)
        query, key, value, *_, output = self.metadata.get_shardings(mode)

        def place(x, spec):
            spec = self.strategy.create_stable_sharding(spec, tensor=x)
            assert spec == P(None, None, "tp")
            return jax.device_put(x, NamedSharding(MESH, spec))

        q, k, v = place(q, query), place(k, key), place(v, value)
        if cache is not None:
            cache = KVCache(place(cache.key, key), place(cache.value, value), cache.length)
        run = jax.jit(self.step).lower(q, k, v, cache, counts).compile()
        for moved in re.findall(
            COLLECTIVE, run.as_text()
        ):  # of what raises, see test_cache_memory.py
            assert re.match(rf"s32\[{B}(,\d+)?\]", moved), moved
        out, cache = run(q, k, v, cache, counts)
        assert out.sharding.spec == self.strategy.create_stable_sharding(output, tensor=out)
        for x in () if cache is None else (cache.key, cache.value):
            assert x.sharding.spec == P(None, None, "tp")
        return np.asarray(out), cache

    def step(self, q, k, v, cache, counts):
        if cache is None:
            return attention(q, k, v, self.strategy, mask=Causal()).attention_outputs, None
        offset, cache = cache.length, cache.append(k, v, counts)
        mask = Causal() & cache.mask()
        out = attention(q, cache.key, cache.value, self.strategy, mask=mask, q_offset=offset)
        return out.attention_outputs, cache


@pytest.mark.parametrize("strategy", [Ragged])
def test_every_mode(strategy):
    rng = np.random.default_rng(0)
    exact = [rng.standard_normal((B, T, n, D)) for n in (H, K, K)]
    q, k, v = (jnp.asarray(x, jnp.float32) for x in exact)
    q64, k64, v64 = exact
    of = oracle.Problem(q64, k64, v64, scale=D**-0.5, mask=om.causal(T, T))
    want = oracle.forward(of).out
    close = lambda got, want: np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)
    serve = Server(strategy)
    out, _ = serve(q, k, v)
    close(out, want)
    cache, rest = KVCache.empty(B, CAPACITY, K, D), jnp.array([7, 0])
    part = lambda start, stop: tuple(x[:, start:stop] for x in (q, k, v))
    out, cache = serve(*part(0, 7), cache, rest)  # the first row's prompt
    close(out[0], want[0, :7])
    both = jnp.array([1, 0])
    out, cache = serve(*part(7, 8), cache, both)  # it generates
    close(out[0], want[0, 7:8])
    out, cache = serve(*part(0, 9), cache, jnp.array([0, 9]), insert=True)  # the second joins
    close(out[1], want[1, :9])
    mixed = [jnp.stack([x[0, 8:9], x[1, 9:10]]) for x in (q, k, v)]
    out, cache = serve(*mixed, cache)  # both generate
    close(out, np.stack([want[0, 8:9], want[1, 9:10]]))
    assert cache is not None and cache.length.tolist() == [9, 10]
    one = RuntimeMode.AUTOREGRESSIVE
    modes = [RuntimeMode.TRAIN, RuntimeMode.PREFILL, one, RuntimeMode.INSERT, one]
    assert serve.modes == modes
