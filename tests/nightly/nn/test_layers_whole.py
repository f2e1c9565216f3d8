"""Every combination of which tests/unit/nn takes few."""

import pytest
import test_heads_over_devices as devices
import test_latent_adapters as adapters
import test_latent_attention as latent
import test_layer_cache as caches
import test_layer_ring_sinks as sinks
import test_layer_sections as sections
import test_layouts as layouts
import test_multihead as multihead
from jax.sharding import AxisType

from eqattn import AttentionMetadata, Blockwise, Dense


@pytest.mark.parametrize("masked", multihead.MASKED)
@pytest.mark.parametrize("name", multihead.CONSTRUCTIONS)
def test_same_results_and_gradients(name, masked):
    multihead.test_same_results_and_gradients(name, masked)


@pytest.mark.parametrize("name", multihead.CONSTRUCTIONS)
def test_checkpoints_both_ways(name):
    multihead.test_checkpoints_both_ways(name)


@pytest.mark.parametrize("name", multihead.MASKS)
@pytest.mark.parametrize("window", multihead.WINDOWS)
def test_masks_and_windows(name, window):
    multihead.test_masks_and_windows(name, window)


@pytest.mark.parametrize("shape, gradient", [((4, 256), False), ((3, 1), True)])
def test_vmap_costs_what_a_batch_by_hand_does(shape, gradient):
    multihead.test_vmap_costs_what_a_batch_by_hand_does(shape, {}, gradient)


@pytest.mark.parametrize("place", layouts.PLACES)
@pytest.mark.parametrize("feature", layouts.FEATURES)
def test_whole_arrays_in_layouts(place, feature, x64):
    layouts.test_whole_arrays(place, feature)


@pytest.mark.parametrize("place", sorted(set(layouts.PLACES) - {"zigzag of two"}))
def test_layouts_in_a_shard_map(place, x64):
    layouts.test_in_a_shard_map(place)


@pytest.mark.parametrize("strategy", [None, Dense(AttentionMetadata()), Blockwise()])
@pytest.mark.parametrize("kind", sections.KINDS)
def test_values_of_sections(kind, strategy, x64):
    sections.test_values(kind, strategy, x64)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("norm", [None, "rms", "layer"])
def test_heads_over_devices(kind, norm):
    devices.test_heads_over_devices(kind, norm)


@pytest.mark.parametrize("kind, bias", adapters.CASES)
@pytest.mark.parametrize(
    "test",
    [
        adapters.test_values_and_largest_logits,
        adapters.test_a_query_that_sees_no_key_has_no_bias_of_the_values,
    ],
)
def test_adapters_of_latents(test, kind, bias, x64):
    test(kind, bias, x64)


def test_gradients_of_an_adapter(x64):
    adapters.test_gradients_of_an_adapter("subclass", x64)


def test_both_forms_of_latents_are_what_is_published(x64):
    latent.test_both_forms_are_what_is_published(None, x64)


def test_decoding_latents_of_eight_bits_is_the_whole():
    latent.test_decoding_is_the_whole("int8")


def test_a_prompt_and_then_token_by_token(x64):
    caches.test_a_prompt_and_then_token_by_token("dense", x64)


def test_decoding_with_sinks_token_by_token(x64):
    sinks.test_decoding(None, 1, x64)


@pytest.mark.parametrize("name, formula", [("rms", multihead.rms), ("layer", multihead.layer_norm)])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_qk_norm(name, formula, kv_heads):
    multihead.test_qk_norm(name, formula, kv_heads)


def test_as_many_heads_of_keys_as_of_queries():
    multihead.test_num_kv_heads(4)


@pytest.mark.parametrize("name", ["blockwise", "dense"])
def test_strategies_agree(name):
    multihead.test_strategies_agree(name)


def test_integers_as_masks():
    multihead.test_numbers_as_masks("int32")


@pytest.mark.parametrize("kind", sections.KINDS)
@pytest.mark.parametrize("test", [sections.test_gradients, sections.test_latents])
def test_kinds_of_sections(test, kind, x64):
    test(kind, x64)


@pytest.mark.parametrize("name", sections.CACHES)
def test_a_cache_counts_tokens_and_the_caller_gives_coordinates(name, x64):
    sections.test_a_cache_counts_tokens_and_the_caller_gives_coordinates(name, x64)


def test_over_devices_coordinates_lie_as_the_tokens_do(x64):
    sections.test_over_devices_coordinates_lie_as_the_tokens_do(False, x64)
