"""Promises of the documentation that say "never", "always" or "any", and the tests that hold them.

A sentence with "never" or "always" that is not listed fails, and so does an entry whose sentence or
test is no longer there.
"""

import ast
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from eqattn import attention, AttentionMetadata, Blockwise


ROOT = Path(__file__).parents[1]
CORNERS = "conformance/test_corners.py"

# (page, the words, the test). A sentence may be shortened at its ends.
PROMISES = [
    ("README.md", "Carries merge, exactly and in any order.", "test_carry.py::test_any_order_and_any_brackets_equal_the_whole"),
    ("README.md", "any leading axes, any lengths, grouped queries without copies", f"{CORNERS}::test_any_length_with_any_block"),
    ("README.md", "NaN or Inf in what is masked reaches nothing", f"{CORNERS}::test_masked_keys_and_values_are_never_read"),
    ("contributing.md", "What is reported as empty is always so", "masks/test_intervals.py::test_sound_for_random_functions"),
    ("contributing.md", "never another definition of attention", "kernels/test_tpu_values.py"),
    ("decoding.md", "caches are never gathered", "cache/test_cache_memory.py::test_sharded_heads_are_not_gathered"),
    ("decoding.md", "Prefixes of whole pages are never copied.", "cache/test_shared_pages.py::test_a_page_is_copied_when_it_is_written"),
    ("index.md", "keys and values are never repeated in memory", "test_promises.py::test_keys_and_values_are_never_repeated"),
    ("index.md", "Blocks in which nothing is visible are never visited", "sweep/test_sweep.py::test_visits_live_blocks_only"),
    ("index.md", "Every transformation of JAX works, in any order, in linear memory.", "sweep/test_transforms.py::test_transform"),
    ("index.md", "Every transformation of JAX works, in any order, in linear memory.", "sweep/test_memory.py::test_linear_in_the_sequence"),
    ("layers.md", "a swap never changes results beyond rounding", "nn/test_convert.py::test_a_strategy_is_swapped_in_every_layer"),
    ("masks.md", "Sound for any function.", "masks/test_intervals.py::test_sound_for_random_functions"),
    ("numerics.md", "What *is* visible is never cleaned up", f"{CORNERS}::test_a_visible_nonfinite_value_reaches_exactly_the_rows_that_see_it"),
    ("numerics.md", "What *is* visible is never cleaned up", f"{CORNERS}::test_a_visible_nonfinite_key_reaches_exactly_the_rows_that_see_it"),
    ("porting.md", "top-left aligned, for any chunk sizes", f"{CORNERS}::test_top_left_causal_with_any_block"),
    ("porting.md", "any size for any length", f"{CORNERS}::test_any_length_with_any_block"),
    ("porting.md", "any broadcastable shape, with its gradient", "scores/test_scores.py::test_bias_of_any_shape_has_its_gradient"),
    ("ring.md", "Attention weights are never formed.", "ring/test_layouts_and_plans.py::test_weights_are_not_supported"),
    ("scores.md", "Any float array that broadcasts to `[*b, h, t, s]`.", "scores/test_scores.py::test_bias_broadcasts"),
    ("scores.md", "a vector is never reinterpreted", "problem/test_attention_errors.py::test_bad_input"),
    ("scores.md", "the same for any block size, strategy and number of devices", "scores/test_dropout.py::test_every_strategy_and_block_size_drops_the_pairs_of_the_mask"),
    ("strategies.md", "It never changes what is computed.", "conformance/test_conformance.py"),
]  # fmt: skip

# Sentences with the words that promise nothing.
OTHER = [
    ("masks.md", "always false, always true, or unknown"),
    ("ring.md", "a peer never starts"),
]


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
            if re.search(r"\b(never|always)\b", sentence, re.IGNORECASE):
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
        memory = jax.jit(fn).lower(query, key, key).compile().memory_analysis()
        assert memory.temp_size_in_bytes < heads * one / 2
