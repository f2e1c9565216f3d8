"""Every kind of cache whose tokens are spread over devices, in every way of tests/unit/cache."""

import jax.numpy as jnp
import pytest
import test_handover as handover
import test_key_shards as shards
import test_key_shares as shares
import test_packed_key_shards as packed

from eqattn import Contiguous


@pytest.mark.parametrize("name", shards.MAKE)
def test_a_prompt_and_drafts(name):
    shards.test_a_prompt_and_drafts(name)


def test_gradients_of_everything_in_a_shard_map(x64):
    shards.test_gradients_of_everything(True, x64)


def test_one_merge_is_all_that_travels():
    shards.test_one_merge_is_all_that_travels("float32")


def test_shared_pages_in_a_shard_map_of_ones_own():
    shards.test_shared_pages_in_a_shard_map_of_ones_own(1)


def test_pages_of_many_layers_on_one_device():
    shards.test_pages_of_many_layers(1, jnp.int8)


@pytest.mark.parametrize("name", shares.MAKE)
def test_what_a_step_reads_and_sends(name):
    shares.test_what_a_step_reads_and_sends(name)


@pytest.mark.parametrize("name", [x for x in shares.MAKE if "latents" in x])
def test_latents_on_several_devices(name):
    shares.test_latents_on_several_devices(name)


@pytest.mark.parametrize("way", ["automatic", "manual"])
@pytest.mark.parametrize("name", packed.MAKE)
def test_packed_queries_on_devices(name, way):
    packed.test_on_devices(name, way)


def test_keys_and_values_of_a_contiguous_ring_stay():
    handover.test_keys_and_values_stay(Contiguous())
