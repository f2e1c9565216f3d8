"""JAX's persistent compilation cache has the step of decoding that another process compiled."""

import json
import os
import subprocess
import sys

import jax
import pytest


CHILD = """
import json, jax, jax.numpy as jnp
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
hits = []
jax.monitoring.register_event_listener(lambda name, **_: "cache_hits" in name and hits.append(name))
from eqattn.cache import KVCache, RingBufferCache
from eqattn.nn import MultiheadAttention
layer = MultiheadAttention(2, 16, window=(3, 0), key=jax.random.key(0))
step = jax.jit(lambda layer, cache, x: layer(x, mask="causal", cache=cache))
found = {}
for kind in (KVCache, RingBufferCache):
    cache, x = kind.empty(1, 32, 2, 8), jnp.ones((1, 16))
    compiled, before = step.lower(layer, cache, x), len(hits)
    compiled.compile()
    found[kind.__name__] = len(hits) > before
print(json.dumps(found))
"""

# Older versions keep no program that may call the host.
KEEPS_CALLS = jax.__version_info__ >= (0, 12)


@pytest.mark.parametrize(
    "on_error",
    [
        "nan",
        pytest.param("raise", marks=pytest.mark.skipif(not KEEPS_CALLS, reason="older JAX")),
    ],
)
def test_a_second_process_finds_the_step(on_error, tmp_path):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "EQX_ON_ERROR": on_error, "XLA_FLAGS": ""}
    env["JAX_COMPILATION_CACHE_DIR"] = str(tmp_path)
    runs = []
    for _ in range(2):
        child = subprocess.run(
            [sys.executable, "-c", CHILD], env=env, capture_output=True, text=True
        )
        assert child.returncode == 0, child.stderr
        runs.append(json.loads(child.stdout.splitlines()[-1]))
    assert runs[0] == {"KVCache": False, "RingBufferCache": False}
    assert runs[1] == {"KVCache": True, "RingBufferCache": True}
