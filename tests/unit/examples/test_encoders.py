"""The blocks of the page on encoders compute what transformers does, which `blocks.npz` holds."""

import ast
import re
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest


ROOT = Path(__file__).parents[3]
ARRAYS = np.load(Path(__file__).parent / "blocks.npz")
PROJECTIONS = "query_proj", "key_proj", "value_proj", "output_proj"


@pytest.fixture(scope="module")
def page():
    """What the page defines."""
    text, namespace = (ROOT / "docs/pages/encoders.md").read_text(), {}
    tree = ast.parse("\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)))
    kinds = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef
    tree.body = [x for x in tree.body if isinstance(x, kinds)]
    exec(compile(tree, "encoders.md", "exec"), namespace)
    return namespace


def filled(block, family, names):
    """The block with the arrays of a family: `names` says of which module each path is."""
    for path, name in names.items():
        where = lambda m, path=path: eval(f"m.{path}", {"m": m})
        for part in ("weight", "bias"):
            if f"{family}/{name}.{part}" in ARRAYS:
                leaf = lambda m, where=where, part=part: getattr(where(m), part)
                assert leaf(block).shape == ARRAYS[f"{family}/{name}.{part}"].shape
                block = eqx.tree_at(leaf, block, jnp.asarray(ARRAYS[f"{family}/{name}.{part}"]))
    return block


def attention_names(prefix, target, parts):
    return {f"{target}.{ours}": prefix + x for ours, x in zip(PROJECTIONS, parts, strict=True)}


def check_rows(block, family):
    lengths, x, want = ARRAYS["lengths"], ARRAYS[f"{family}/in"], ARRAYS[f"{family}/out"]
    got = jax.jit(jax.vmap(block))(x, lengths)
    for i, n in enumerate(lengths):
        assert np.abs(got[i, :n] - want[i, :n]).max() < 1e-5 * np.abs(want).max()


def test_bert(page):
    parts = "self.query", "self.key", "self.value", "output.dense"
    names = attention_names("attention.", "attention", parts)
    names |= {"norms[0]": "attention.output.LayerNorm", "norms[1]": "output.LayerNorm"}
    names |= {"up": "intermediate.dense", "down": "output.dense"}
    check_rows(filled(page["BertBlock"](4, 16, 24, key=jax.random.key(0)), "bert", names), "bert")


def test_modernbert(page):
    block = page["ModernBertBlock"](4, 16, 24, window=2, theta=1e4, key=jax.random.key(0))
    names = {"norms[0]": "attn_norm", "norms[1]": "mlp_norm", "down": "mlp.Wo"}
    names["attention.output_proj"] = "attn.Wo"
    block = filled(block, "modernbert", names)
    split = [
        *np.split(ARRAYS["modernbert/attn.Wqkv.weight"], 3),
        *np.split(ARRAYS["modernbert/mlp.Wi.weight"], 2),
    ]
    modules = lambda m: [*(getattr(m.attention, x) for x in PROJECTIONS[:3]), m.up, m.gate]
    block = eqx.tree_at(lambda m: [x.weight for x in modules(m)], block, [*map(jnp.asarray, split)])
    check_rows(block, "modernbert")


def test_whisper(page):
    parts = "q_proj", "k_proj", "v_proj", "out_proj"
    names = attention_names("self_attn.", "own", parts)
    names |= attention_names("encoder_attn.", "cross", parts)
    norms = "self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"
    names |= {f"norms[{i}]": name for i, name in enumerate(norms)} | {"up": "fc1", "down": "fc2"}
    block = filled(page["CrossBlock"](4, 16, 24, key=jax.random.key(0)), "whisper", names)

    @jax.jit
    @jax.vmap
    def run(x, sound):
        return block(x, page["KVCache"].empty(1, 11, 4, 4), block.encoded(sound))[1]

    got, want = run(ARRAYS["whisper/in"], ARRAYS["whisper/encoder"]), ARRAYS["whisper/out"]
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()
