"""Promises of the documentation that say "never", "always" or "any", and the tests that hold them.

A sentence with "never", "always" or "any" that is not listed fails, and so does an entry whose
sentence or test is no longer there.
"""

import ast
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from _programs import DEFAULT_CODE

from eqattn import attention, AttentionMetadata, Blockwise


ROOT = Path(__file__).parents[1]
CORNERS = "conformance/test_corners.py"

# (page, the words, the test). A sentence may be shortened at its ends.
PROMISES = [
    ("README.md", "Carries merge, exactly and in any order.", "test_carry.py::test_any_order_and_any_brackets_equal_the_whole"),
    ("README.md", "any leading axes, any lengths, grouped queries without copies", f"{CORNERS}::test_any_length_with_any_block"),
    ("README.md", "NaN or Inf in what is masked reaches nothing", f"{CORNERS}::test_masked_keys_and_values_are_never_read"),
    ("README.md", "bias of any broadcastable shape", "scores/test_scores.py::test_bias_broadcasts"),
    ("index.md", "Carries merge exactly, in any order.", "test_carry.py::test_any_order_and_any_brackets_equal_the_whole"),
    ("carry.md", "and the parts merged in any order", "test_carry.py::test_any_order_and_any_brackets_equal_the_whole"),
    ("contributing.md", "What is reported as empty is always so", "masks/test_intervals.py::test_sound_for_random_functions"),
    ("contributing.md", "never another definition of attention", "kernels/test_tpu_values.py"),
    ("decoding.md", "caches are never gathered", "cache/test_cache_memory.py::test_sharded_heads_are_not_gathered"),
    ("decoding.md", "Prefixes of whole pages are never copied.", "cache/test_shared_pages.py::test_a_page_is_copied_when_it_is_written"),
    ("decoding.md", "Rows go on, end and are released in any order.", "cache/test_shared_pages.py::test_nothing_is_lost_whatever_the_order"),
    ("decoding.md", "values that are part of the keys, in any of these", "cache/test_latent.py::test_steps_are_the_whole"),
    ("decoding.md", "It wraps a cache of any kind", "cache/test_latent.py::test_steps_are_the_whole"),
    ("decoding.md", "reads blocks of any dtype where they lie", "cache/test_cache_memory.py::test_narrow_floats_are_read_where_they_lie"),
    ("decoding.md", "`reserve` costs the host the same for any number of them", "cache/test_key_shards.py::test_pages_of_many_layers"),
    ("differentiation.md", "every order and mode follows, for any score and mask", "conformance/test_conformance.py"),
    ("differentiation.md", "Hessian-vector products in any composition, and third order", "sweep/test_transforms.py::test_transform"),
    ("gpu.md", "any lengths and block sizes, and grouped queries", "kernels/test_gpu.py::test_values"),
    ("index.md", "keys and values are never repeated in memory", "test_promises.py::test_keys_and_values_are_never_repeated"),
    ("index.md", "Blocks in which nothing is visible are never visited", "sweep/test_sweep.py::test_visits_live_blocks_only"),
    ("index.md", "Every transformation of JAX works, in any order, in linear memory.", "sweep/test_transforms.py::test_transform"),
    ("index.md", "Every transformation of JAX works, in any order, in linear memory.", "sweep/test_memory.py::test_linear_in_the_sequence"),
    ("index.md", "with any number of batch axes, also none", "conformance/test_conformance.py"),
    ("index.md", "Keys may be more or fewer than queries, of any length", f"{CORNERS}::test_any_length_with_any_block"),
    ("layers.md", "a swap never changes results beyond rounding", "nn/test_convert.py::test_a_strategy_is_swapped_in_every_layer"),
    ("layers.md", "With any cache, all rows can stand in front of the inputs instead.", "nn/test_layer_cache.py::test_rows_of_unequal_length"),
    ("layers.md", "So does any strategy over devices inside of your own", "nn/test_layouts.py::test_in_a_shard_map"),
    ("masks.md", "Sound for any function.", "masks/test_intervals.py::test_sound_for_random_functions"),
    ("masks.md", "Any order of the tokens gives the same results", "masks/test_trees.py::test_values_and_gradients_of_each_path"),
    ("masks.md", "The keys that a query lists may lie on any device.", "masks/test_selected.py::test_lists_of_tokens_that_are_sharded"),
    ("masks.md", "The grid may have any number of axes", "masks/test_neighbourhood.py::test_it_is_what_its_definition_says"),
    ("masks.md", "without any attention", "masks/test_masks.py::test_sparsity"),
    ("numerics.md", "What *is* visible is never cleaned up", f"{CORNERS}::test_a_visible_nonfinite_value_reaches_exactly_the_rows_that_see_it"),
    ("numerics.md", "What *is* visible is never cleaned up", f"{CORNERS}::test_a_visible_nonfinite_key_reaches_exactly_the_rows_that_see_it"),
    ("numerics.md", "are bitwise what they are with any other content", f"{CORNERS}::test_masked_keys_and_values_are_never_read"),
    ("numerics.md", "for any number of devices", "strategies/test_bitwise.py::test_any_number_of_devices"),
    ("numerics.md", "alone or beside others, at any place", "strategies/test_bitwise.py::test_the_bits_of_a_row"),
    ("numerics.md", "in a cache of any capacity", "strategies/test_bitwise.py::test_the_bits_of_a_row"),
    ("numerics.md", "or in pages of `blocksize_k` tokens in any order", "strategies/test_bitwise.py::test_the_bits_of_a_row"),
    ("numerics.md", "on any number of devices, each with whole blocks of keys", "strategies/test_bitwise.py::test_any_number_of_devices"),
    ("pictures.md", "so it draws a mask at any length", "viz/test_viz.py::test_blocks_of_a_long_row_and_of_lengths_that_do_not_divide"),
    ("pictures.md", "without any device", "viz/test_viz.py::test_ring"),
    ("porting.md", "top-left aligned, for any chunk sizes", f"{CORNERS}::test_top_left_causal_with_any_block"),
    ("porting.md", "any size for any length", f"{CORNERS}::test_any_length_with_any_block"),
    ("porting.md", "any broadcastable shape, with its gradient", "scores/test_scores.py::test_bias_of_any_shape_has_its_gradient"),
    ("porting.md", "any shape that broadcasts", "scores/test_scores.py::test_bias_broadcasts"),
    ("porting.md", "the same, with gradients of any order", "scores/test_scores.py::test_gradient_of_what_a_function_holds"),
    ("porting.md", "any number of leading ones included", "conformance/test_conformance.py"),
    ("porting.md", "masks of any kind skip blocks", "sweep/test_sweep.py::test_visits_live_blocks_only"),
    ("pretrained.md", "may be any module that takes a vector", "nn/test_multihead.py::test_exchanged_projections"),
    ("ring.md", "Attention weights are never formed.", "ring/test_layouts_and_plans.py::test_weights_are_not_supported"),
    ("ring.md", "for any number of heads", "ring/test_against_oracle.py::test_every_feature_on_any_number_of_devices"),
    ("scores.md", "any float array that broadcasts to `[*b, h, t, s]`", "scores/test_scores.py::test_bias_broadcasts"),
    ("scores.md", "a vector is never reinterpreted", "problem/test_attention_errors.py::test_bad_input"),
    ("scores.md", "the same for any block size, strategy and number of devices", "scores/test_dropout.py::test_every_strategy_and_block_size_drops_the_pairs_of_the_mask"),
    ("scores.md", "may have any float dtype beside any dtype of the queries", "conformance/test_operand_dtypes.py::test_operands_of_any_dtype"),
    ("strategies.md", "It never changes what is computed.", "conformance/test_conformance.py"),
    ("strategies.md", "any object or mapping with the usual attributes", "config/test_base_config.py::test_from_config_reads_the_table"),
    ("tpu.md", "over caches of any kind", "kernels/test_tpu_ragged.py::test_caches"),
    ("tpu.md", "of caches of any kind", "kernels/test_tpu_ragged_meshes.py::test_numbers"),
    ("tpu.md", "which serves any mask", "conformance/test_conformance.py"),
]  # fmt: skip

# Sentences with the words that promise nothing.
OTHER = [
    ("cookbook.md", "These are keys like any others"),
    ("cookbook.md", "The head is an argument like any other."),
    ("gpu.md", "interpreted on any device: very slow"),
    ("layers.md", "as with any Equinox layer"),
    ("limitations.md", "XLA, any device"),
    ("masks.md", "always false, always true, or unknown"),
    ("masks.md", "A boolean array is an operand like any other."),
    ("masks.md", "Without any:"),
    ("numerics.md", "A row should then have the same bits alone and in any batch"),
    ("numerics.md", "no strategy promises any of this"),
    ("ring.md", "a peer never starts"),
    ("strategies.md", "on any backend"),
    ("strategies.md", "on any device, slowly"),
    ("strategies.md", "`backend` is `ANY`"),
    ("strategies.md", "The default is `ANY`"),
    ("tpu.md", '`"any"`'),
    ("tpu.md", '| `"xla"` | any | XLA |'),
    ("tpu.md", '| any but `"gpu"`, `"cuda"` |'),
    ("tpu.md", "Pages may be any row's"),
    ("tpu.md", "compiles without any transpose"),
    ("tpu.md", "without any across lanes"),
    ("types.md", "`jax.grad` returns `Any`"),
    ("types.md", "a `Carry | Any`"),
    ("types.md", "Any checker of types will do"),
]  # fmt: skip


def flat(text: str) -> str:
    return " ".join(text.split())


PAGES = {
    path.name: path.read_text()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs" / "pages").glob("*.md")))
}


@pytest.mark.parametrize("page, words, test", PROMISES)
def test_the_promise_and_its_test_are_there(page, words, test):
    assert words in flat(PAGES[page]), f"{page} no longer says so: {words}"
    file, _, name = test.partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text())
    names = {x.name for x in tree.body if isinstance(x, ast.FunctionDef)}
    assert (name in names) if name else any(x.startswith("test_") for x in names), test


@pytest.mark.parametrize("page, words", OTHER)
def test_what_is_no_promise_is_there(page, words):
    assert words in flat(PAGES[page])


def sentences(text: str) -> list[str]:
    """Of prose: code blocks are left out, and items and rows are ends."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    parts = [flat(part) for part in re.split(r"\n\n|\n(?=[-|#])", prose)]
    return [x for part in parts for x in re.split(r"(?<=[.;]) (?=[A-Z*`\[])", part)]


def test_no_promise_is_left_out():
    for page, text in PAGES.items():
        known = [words for p, words, *_ in (*PROMISES, *OTHER) if p == page]
        for sentence in sentences(text) if page != "changelog.md" else ():
            if re.search(r"\b(never|always|any)\b", sentence, re.IGNORECASE):
                assert any(words in sentence for words in known), f"{page}: {sentence}"


def test_a_sentence_is_found():
    text = "It is so.\nIt never\nis not.\n\n```text\nnever\n```\n- Any `x`; Always y."
    assert sentences(text)[:2] == ["It is so.", "It never is not."]
    assert "Always y." in sentences(text)[-1] and not any("text" in x for x in sentences(text))


def test_keys_and_values_are_never_repeated():
    """Not for a query of few rows, whose own arrays are small, neither forward nor backward."""
    heads, tokens, dim = 8, 4096, 64
    query = jax.ShapeDtypeStruct((1, 8, heads, dim), jnp.float32)
    key = jax.ShapeDtypeStruct((1, tokens, 1, dim), jnp.float32)

    def loss(query, key, value):
        return attention(query, key, value, Blockwise(AttentionMetadata())).attention_outputs.sum()

    one = tokens * dim * 4
    for fn in (loss, jax.grad(loss, (0, 1, 2))):
        memory = jax.jit(fn).lower(query, key, key).compile(DEFAULT_CODE).memory_analysis()
        assert memory.temp_size_in_bytes < heads * one / 2
