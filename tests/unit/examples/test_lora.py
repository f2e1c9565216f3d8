"""Adapters change nothing at first, learn, go on where they were, and merge; packed documents are
computed as if each stood alone.
"""

from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest


pytest.importorskip("tokenizers", reason="tokenizers is not installed: it is in the tests extra")

from pretrained.checkpoint import load  # noqa: E402
from pretrained.lora import adapt, LoRA, merge, pack, packed_loss, split  # noqa: E402


REFERENCES = Path(__file__).parent / "references"


def test_documents_are_packed():
    tokens, positions, segments = pack([[1, 2, 3], [4, 5], [6, 7, 8, 9, 10, 11], [12]], 5)
    assert tokens.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 0, 0, 0]]
    assert positions.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4], [0, 0, 0, 0, 0]]
    assert segments.tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, 0], [0, 1, -1, -1, -1]]


def test_packed_documents_are_apart_and_adapters_merge():
    """With transformers' logits of each document alone, of a model with windows."""
    model, _ = load(REFERENCES / "gemma3")
    arrays = np.load(REFERENCES / "gemma3" / "reference.npz")
    documents = [arrays["tokens/1"], arrays["tokens/0"]]
    packed = pack([x.tolist() for x in documents], 40)
    adapted = adapt(model, 2, 0.5, jax.random.key(0))
    wrapped = [
        x for x in jax.tree.leaves(adapted, is_leaf=lambda x: isinstance(x, LoRA))
        if isinstance(x, LoRA)
    ]  # fmt: skip
    assert len(wrapped) == 2 * 4  # query, key, value and output of each layer
    moved = jax.tree.map(
        lambda x: eqx.tree_at(lambda m: m.up, x, 0.1 + x.up) if isinstance(x, LoRA) else x,
        adapted,
        is_leaf=lambda x: isinstance(x, LoRA),
    )

    @jax.jit
    def run(adapted, moved, merged):
        arrays = [x[0] for x in packed]
        adapters, frozen = split(moved)
        loss = lambda adapters: packed_loss(eqx.combine(adapters, frozen), packed)
        return *(model(*arrays) for model in (adapted, moved, merged)), jax.value_and_grad(loss)(
            adapters
        )

    same, other, merged, (value, gradient) = run(adapted, moved, merge(moved))
    want = np.concatenate([arrays["logits/1"], arrays["logits/0"]])
    assert np.abs(same[:33] - want).max() < 1e-5 * np.abs(want).max()
    assert np.abs(other - same).max() > 0.01
    assert np.abs(merged - other).max() < 1e-4
    # The mean over the tokens that follow another of their document.
    log_p = jax.nn.log_softmax(other)
    each = [log_p[i, t] for i, t in enumerate(packed[0][0, 1:33]) if i != 12]
    assert np.isclose(value, -np.mean(each), rtol=1e-5)
    leaves = jax.tree.leaves(gradient)
    assert len(leaves) == 2 * len(wrapped) and all(jnp.any(x != 0) for x in leaves)


def test_adapters_of_latent_attention():
    model, _ = load(REFERENCES / "deepseek_v3")
    adapted = adapt(model, 2, 1.0, jax.random.key(0))
    adapters, _ = split(adapted)
    assert len(jax.tree.leaves(adapters)) == 2 * 2 * 4  # q_a, q_b, kv_a and o of both layers
    assert eqx.tree_equal(merge(adapted), model)
