"""Published families on eqattn compute what transformers computes, which `references/` holds."""

import copy
import functools
import json
import re

import jax
import numpy as np
import pytest


pytest.importorskip("tokenizers", reason="tokenizers is not installed: it is in the tests extra")

import pretrained_decoder as example  # noqa: E402
import test_pretrained_decoder as unit  # noqa: E402
from pretrained.checkpoint import assemble, read_tensors  # noqa: E402
from test_pretrained_decoder import (  # noqa: E402, F401
    FAMILIES,
    numbers,
    quick_compilation,
    reference,
    REFERENCES,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients(family):
    unit.test_logits_and_gradients(family)


@pytest.mark.parametrize("kind", ["ring", "contiguous"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generated_tokens(family, kind):
    unit.test_generated_tokens(family, kind)


@pytest.mark.parametrize("strategy", ["blockwise", "dense"])
def test_strategies_generate_the_same(strategy, capsys):
    unit.test_strategies_generate_the_same(strategy, capsys)


def test_eight_bits_change_logits_little():
    unit.test_eight_bits_change_logits_little("gemma3")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_number_of_a_config_shows(family):
    """A check that passes with another number would not have noticed that it is ignored."""
    folder = REFERENCES / family
    config = json.loads((folder / "config.json").read_bytes())
    tensors = read_tensors(folder / "model.safetensors")
    tensors = {name: x.astype(np.float32) for name, x in tensors.items()}
    arrays, (row, _), _ = reference(family)
    bound = 1e-5 * max(1.0, np.abs(arrays["logits/0"]).max())

    def error(config):
        logits = jax.jit(lambda model: model(row))(assemble(config, tensors))
        return np.abs(logits - arrays["logits/0"]).max() / bound

    assert error(config) < 1
    for path in numbers(config):
        changed = copy.deepcopy(config)
        inner = functools.reduce(lambda x, name: x[name], path[:-1], changed)
        # The ends of a YaRN ramp are rounded, so a length that is close by has the same.
        steps = dict(original_max_position_embeddings=7 * inner[path[-1]], sliding_window=1)
        inner[path[-1]] += steps.get(path[-1], 0.05 * inner[path[-1]])
        assert error(changed) > 10, path


def test_a_cache_is_compared_with_recomputation(capsys):
    assert example.main([str(REFERENCES / "qwen3"), "--random", "--compare", "48"]) == 0
    assert re.fullmatch(
        r"a step after 48 tokens: \S+ ms with a cache, \S+ ms without, \S+ times as long\n",
        capsys.readouterr().out,
    )
