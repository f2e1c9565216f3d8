"""The guide for Flax, where Flax is installed: it is in no extra of this project."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest


PAGE = Path(__file__).parents[3] / "docs" / "pages" / "porting.md"


def test_attention_of_nnx():
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    (source,) = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    namespace = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # for flax
        exec(source, namespace)
        plain = nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0))
        q, k = jnp.arange(10)[:, None], jnp.arange(10)[None]
        want = plain(namespace["x"], mask=((k <= q) & (q - k <= 3))[None, None])
        assert jnp.allclose(namespace["out"], want, atol=1e-5)
        plain.attention_fn = namespace["attend"]
        causal = nnx.make_causal_mask(jnp.ones((2, 10)))
        want = nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0))(
            namespace["x"], mask=causal
        )
        assert jnp.allclose(plain(namespace["x"], mask=causal), want, atol=1e-5)
        whole = nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0))(namespace["x"])
        assert jnp.allclose(plain(namespace["x"]), whole, atol=1e-5)
        with pytest.raises(ValueError, match="Dense the weights"):
            plain(namespace["x"], sow_weights=True)
