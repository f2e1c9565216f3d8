"""Every combination of which tests/unit/nn takes few."""

import pytest
import test_heads_over_devices as devices
import test_latent_adapters as adapters
import test_latent_attention as latent
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
