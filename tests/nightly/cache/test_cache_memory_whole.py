"""What tests/unit/cache/test_cache_memory.py asks of few combinations, of all."""

import jax.numpy as jnp
import pytest
import test_cache_memory as unit


@pytest.mark.parametrize("kv_heads, new, batch", unit.SHAPES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("kind", unit.KINDS)
def test_no_step_copies_the_cache(kind, dtype, kv_heads, new, batch):
    unit.test_no_step_copies_the_cache(kind, dtype, kv_heads, new, batch)


def test_no_step_copies_a_cache_of_any_capacity():
    unit.test_no_step_copies_a_cache_of_any_capacity("dense", 4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("tokens", [128, 96])
@pytest.mark.parametrize("appended", [False, True])
def test_no_step_copies_keys_of_a_single_block(appended, tokens, dtype):
    unit.test_no_step_copies_keys_of_a_single_block(appended, tokens, dtype)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("dtype, kv_heads", [(jnp.bfloat16, 2), (jnp.float32, 1)])
def test_no_layer_copies_its_cache(dtype, kv_heads, batch):
    unit.test_no_layer_copies_its_cache(dtype, kv_heads, batch)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("heads", [1, "latents", 2])
def test_pages_of_layers_are_not_copied(heads, dtype):
    unit.test_pages_of_layers_are_not_copied(heads, dtype)


def test_sharded_heads_are_not_gathered():
    unit.test_sharded_heads_are_not_gathered("ring buffer")
