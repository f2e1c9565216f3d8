"""What XLA does not compute while it compiles, where a program holds large arrays as constants."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqattn import attention, AttentionMetadata, Blockwise, Causal, DenseMask, Selected


LISTS = np.argsort(np.random.default_rng(0).random((256, 256)), 1)[None, :, :128]


CASES = {
    "a mask of NumPy": (256, 128, DenseMask(np.tri(256, dtype=bool)), "reduce of pred[1,1,2,256]"),
    "a mask": (256, 128, DenseMask(jnp.tri(256, dtype=bool)), "reduce of pred[1,1,2,256]"),
    "lists": (256, 128, Selected(LISTS), "sort of s32[1,1,256,128]"),
    "blocks": (1040, 8, Causal(), "sort of s32[130,130]"),
}


@pytest.mark.parametrize("name", ["a mask of NumPy", "lists"])
def test_large_constants_are_not_folded(name):
    """The classes of blocks, distinct keys and the order of blocks are found when the program runs.
    While it compiled, XLA took 100 s for a mask of 4096 x 4096.
    """
    tokens, block, mask, result = CASES[name]
    metadata = AttentionMetadata(blocksize_q=block, blocksize_k=block)
    q = jax.ShapeDtypeStruct((1, tokens, 2, 8), jnp.float32)
    call = lambda q: attention(q, q, q, Blockwise(metadata), mask=mask).attention_outputs
    text = jax.jit(call).lower(q).compile().as_text()
    found = re.findall(r"= \(?(\w+\[[\d,]*\])[^=]* (reduce|sort)\(", text)
    assert result in {f"{name} of {shape}" for shape, name in found}
