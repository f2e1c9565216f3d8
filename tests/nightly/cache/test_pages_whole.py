"""Every case of what tests/unit/cache asks of shared pages, of layers in a stack, and of latents."""

import jax.numpy as jnp
import pytest
import test_latent as latent
import test_modes as modes
import test_own_form as own_form
import test_shared_pages as shared
import test_stack_layer as layers
import test_stacked_capacity as capacity

from eqattn import Blockwise


def test_nothing_is_lost_whatever_the_order():
    shared.test_nothing_is_lost_whatever_the_order(1)


def test_a_cascade_is_attention_row_by_row(x64):
    shared.test_a_cascade_is_attention_row_by_row("plain", 1, 64, x64)


@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_cascade_of_groups_within_groups(seed, levels, monkeypatch, x64):
    shared.test_a_cascade_of_groups_within_groups(seed, levels, monkeypatch, x64)


@pytest.mark.parametrize("causal, tokens", [(True, 1), (True, 3), (False, 3)])
def test_a_cascade_with_masks_and_scores(causal, tokens, x64):
    shared.test_a_cascade_with_masks_and_scores(causal, tokens, x64)


@pytest.mark.parametrize("name", shared.TREES)
def test_a_cascade_of_trees(name, x64):
    shared.test_a_cascade_of_trees(name, x64)


@pytest.mark.parametrize("index", range(layers.L))
def test_gradients_reach_one_layer(index, x64):
    layers.test_gradients_reach_one_layer(x64, index)


@pytest.mark.parametrize("axes", layers.AXES)
@pytest.mark.parametrize("platform", ["auto", "interpret"])
def test_layers_under_vmap(axes, platform):
    layers.test_layers_under_vmap(axes, platform)


@pytest.mark.parametrize("backend", ["tpu", "triton"])
@pytest.mark.parametrize("index", [0, 2])
def test_kernels(backend, index):
    layers.test_kernels(backend, index)


@pytest.mark.parametrize("name", [x for x in latent.MAKE if "int8" not in x])
def test_steps_of_latents_are_the_whole(name, x64):
    latent.test_steps_are_the_whole(name, x64)


def test_eight_bits_of_latents_are_close():
    latent.test_eight_bits_are_close("int8")


def test_packed_rows_of_latents(x64):
    latent.test_packed_rows("dense", x64)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", ["dense", "paged", "int8"])
def test_each_byte_of_latents_is_read_once(kind, dtype):
    latent.test_each_byte_is_read_once(kind, dtype)


def test_every_mode_of_blockwise():
    modes.test_every_mode(Blockwise)


@pytest.mark.parametrize("kind", ["rows", "layers"])
def test_steps_over_an_own_form(kind):
    own_form.test_steps_over_an_own_form(kind)


@pytest.mark.parametrize("tokens", capacity.CAPACITIES)
@pytest.mark.parametrize("bits", [False, True])
def test_every_capacity(tokens, bits):
    capacity.test_every_capacity(tokens, bits)


@pytest.mark.parametrize("tokens", [32, 1021])
def test_packed_queries_and_latents_of_every_capacity(tokens):
    capacity.test_packed_queries_and_latents(tokens)
