"""Reads directories in Hugging Face's format: config.json and *.safetensors into a `Decoder`.

A family that lays out its tensors in its own way has a function that returns them as Llama's.
`PLACES` says where those belong in the `Decoder`.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from .decoder import Decoder
from .families import Config, FAMILIES, read_spec, text_config
from .spec import Spec


Tensors = dict[str, Any]


def same(tensors: Tensors, spec: Spec) -> Tensors:
    return tensors


def from_gemma(tensors: Tensors, spec: Spec) -> Tensors:
    """Gemma's norms multiply by one more than their weight, a sum that bfloat16 would round."""
    plus_one = lambda x: x.astype(jnp.float32) + 1
    return {k: plus_one(x) if k.endswith("norm.weight") else x for k, x in tensors.items()}


def from_gpt2(tensors: Tensors, spec: Spec) -> Tensors:
    """GPT-2 has weights `[inputs, outputs]`, and query, key and value in one."""
    found = {}
    for name, x in tensors.items():
        name = re.sub(r"^h\.", "layers.", name)
        if re.search(r"c_\w+\.weight$", name):
            x = x.T
        for old, new in GPT2_NAMES.items():
            name = name.replace(old, new)
        if "c_attn" not in name:
            found[name] = x
            continue
        for part, piece in zip("qkv", jnp.split(x, 3), strict=True):
            found[name.replace("attn.c_attn", f"self_attn.{part}_proj")] = piece
    return found


GPT2_NAMES = {
    "wte": "embed_tokens",
    "wpe": "positions",
    "ln_f": "norm",
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
    ".attn.c_proj": ".self_attn.o_proj",
    "c_fc": "up_proj",
    "mlp.c_proj": "mlp.down_proj",
}


def from_gpt_oss(tensors: Tensors, spec: Spec) -> Tensors:
    """Gate and up alternate in gpt-oss, and experts may have four bits."""
    found = {}
    for name, x in tensors.items():
        if "gate_up_proj" not in name:
            found[name] = x
            continue
        for i, part in enumerate(("gate", "up")):
            found[name.replace("gate_up", part)] = x[..., i::2]
    return found


def from_deepseek(tensors: Tensors, spec: Spec) -> Tensors:
    """Each expert of DeepSeek has tensors of its own. The projections of latents to keys and to
    values are one tensor, whose rows are those of each head.
    """
    assert spec.mixture is not None and spec.latent is not None
    found, of_key = {}, spec.latent.plain_dim
    for name, x in tensors.items():
        if name.endswith(".kv_b_proj.weight"):
            rows = x.reshape(spec.heads, -1, x.shape[-1])
            for part, piece in (("k", rows[:, :of_key]), ("v", rows[:, of_key:])):
                found[name.replace("kv_b", f"{part}_b")] = piece.reshape(-1, x.shape[-1])
            continue
        expert = re.fullmatch(r"(.*\.experts\.)(\d+)\.(\w+)\.weight", name)
        if expert is None:
            found[name.replace("mlp.gate.", "mlp.router.")] = x
        elif expert[2] == "0":
            names = [f"{expert[1]}{i}.{expert[3]}.weight" for i in range(spec.mixture.count)]
            found[expert[1] + expert[3]] = jnp.stack([tensors[name].T for name in names])
    return found


# Names of Llama's tensors, and of the parts of others that Llama has not, as paths in a `Decoder`.
PLACES = {
    r"embed_tokens\.weight": "embedding",
    r"positions\.weight": "positions",
    r"^lm_head": "head",
    r"^layers\.": "blocks.",
    r"self_attn\.sinks": "attention.softmax_aux",
    r"self_attn\.": "attention.",
    r"\.o_proj": ".output_proj",
    r"\.q_norm": ".query_norm",
    r"\.k_norm": ".key_norm",
    r"\.v_proj": ".value_proj",
    r"mlp\.router\.e_score_correction_bias": "mlp.correction",
    r"mlp\.shared_experts\.": "mlp.shared.",
    r"mlp\.experts\.gate_proj_bias": "mlp.biases.0",
    r"mlp\.experts\.up_proj_bias": "mlp.biases.1",
    r"mlp\.experts\.down_proj_bias": "mlp.biases.2",
    r"mlp\.experts\.": "mlp.",
    r"\.(gate|up|down)_proj": r".\1",
    r"\.input_layernorm": ".before.0",
    r"\.pre_feedforward_layernorm": ".before.1",
    r"\.post_feedforward_layernorm": ".after.1",
}


def places(spec: Spec) -> dict[str, str]:
    """`PLACES`, and the names that mean other things in other families."""
    query, key_ = (r"\.q_proj", ".query_proj"), (r"\.k_proj", ".key_proj")
    normed = ".before.1" if spec.norms == "before" else ".after.0"
    extra = {r"\.post_attention_layernorm": normed}
    if spec.qk_norm == "width":
        extra |= {
            r"\.q_norm": ".query_proj.layers.1",
            r"\.k_norm": ".key_proj.layers.1",
            query[0]: ".query_proj.layers.0",
            key_[0]: ".key_proj.layers.0",
        }
    elif spec.latent is not None:  # the layer has DeepSeek's names
        extra |= {
            r"\.kv_a_proj_with_mqa": ".kv_a_proj",
            r"_a_layernorm": "_a_norm",
            r"\.o_proj": ".o_proj",
        }
    else:
        extra |= dict([query, key_])
    return extra | {old: new for old, new in PLACES.items() if old not in extra}


LAYOUTS: dict[str, Callable[[Tensors, Spec], Tensors]] = dict.fromkeys(FAMILIES, same) | {
    "gemma2": from_gemma,
    "gemma3_text": from_gemma,
    "gpt_oss": from_gpt_oss,
    "gpt2": from_gpt2,
    "deepseek_v3": from_deepseek,
}
STEM = re.compile(r"^((model\.)?language_model\.)?(model\.|transformer\.)?")
# Tables that follow from the config, and what sees images.
UNUSED = re.compile(r"rotary_emb|\.attn\.(masked_)?bias$|vision_tower|multi_modal_projector")


def check_quantisation(config: Config) -> None:
    """**Raises:** `ValueError` if numbers are packed in a way that `dequantised` does not know."""
    packed = config.get("quantization_config") or {}
    method, blocks = packed.get("quant_method"), packed.get("weight_block_size")
    if packed and method != "mxfp4" and (method != "fp8" or blocks != [128, 128]):
        raise ValueError(
            f"the quantization_config with quant_method {method!r} and weight_block_size {blocks} "
            "is not known; known: mxfp4, and fp8 with blocks [128, 128]."
        )


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP4 = np.concatenate([FP4, -FP4])


def dequantised(tensors: Tensors) -> Tensors:
    """With the numbers that quantised tensors stand for: those of gpt-oss, of four bits with a
    power of two for each 32, and those of DeepSeek, float8 with a factor for each 128 x 128.
    """
    found = {}
    for name, x in tensors.items():
        if name.endswith("_blocks"):  # [experts, outputs, inputs/32, 16], two numbers in each byte
            halves = jnp.stack([x & 0xF, x >> 4], -1).reshape(*x.shape[:-1], 32)
            power = tensors[name.replace("_blocks", "_scales")].astype(np.int32) - 127
            numbers = jnp.ldexp(jnp.asarray(FP4)[halves], power[..., None])
            found[name.removesuffix("_blocks")] = numbers.reshape(*x.shape[:2], -1).swapaxes(1, 2)
        elif f"{name}_scale_inv" in tensors:
            factor = tensors[f"{name}_scale_inv"].repeat(128, 0).repeat(128, 1)
            found[name] = x.astype(np.float32) * factor[: x.shape[0], : x.shape[1]]
        elif not name.endswith(("_scales", "_scale_inv")):
            found[name] = x
    return found


def assemble(config: Config, tensors: Tensors, dtype: Any = jnp.float32) -> Decoder:
    """The decoder with the tensors of a checkpoint. JAX can trace and differentiate it.

    **Raises:** `ValueError` if a tensor is missing, is left over, or has another shape.
    """
    spec, translate = read_spec(config), LAYOUTS[text_config(config)["model_type"]]
    tensors = {STEM.sub("", name): x for name, x in tensors.items() if not UNUSED.search(name)}
    check_quantisation(text_config(config))
    tensors = dequantised(tensors)
    found, renames = {}, places(spec)
    for name, x in translate(tensors, spec).items():
        if (layer := re.match(r"layers\.(\d+)", name)) and int(layer[1]) >= len(spec.layers):
            continue  # DeepSeek's layers for the prediction of more tokens follow the last
        for old, new in renames.items():
            name = re.sub(old, new, name)
        found[name] = x
    if spec.tied:
        found.pop("head.weight", None)
    skeleton = eqx.filter_eval_shape(Decoder, spec, jax.random.key(0))
    leaves, structure = jax.tree_util.tree_flatten_with_path(skeleton)
    made = []
    for path, wanted in leaves:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if not hasattr(wanted, "shape"):
            made.append(wanted)
            continue
        x = found.pop(name, None)
        if x is None or x.shape != wanted.shape:
            got = "nothing" if x is None else x.shape
            raise ValueError(f"The checkpoint must have {name} of shape {wanted.shape}, got {got}.")
        # Norms compute in float32, whatever their input, so their weights are not rounded.
        exact = re.search(r"(norm|before\.\d|after\.\d|layers\.1)\.weight$", name)
        made.append(jnp.asarray(x).astype(jnp.float32 if exact else dtype))
    if found:
        raise ValueError(f"The checkpoint has tensors that the model has not: {sorted(found)[:5]}.")
    return jax.tree.unflatten(structure, made)


DTYPES = dict(F64="float64", F32="float32", F16="float16", BF16="bfloat16", U8="uint8", I8="int8")
DTYPES |= dict(I64="int64", I32="int32", F8_E4M3="float8_e4m3fn", F8_E5M2="float8_e5m2")
DTYPES |= dict(BOOL="bool")


def read_tensors(path: Path) -> Tensors:
    """The arrays of a .safetensors file, mapped from the disk: 8 bytes with the length of a header
    in JSON, the header, and the numbers. (The package safetensors reads no bfloat16 for NumPy.)

    **Raises:** `ValueError` if it is another file, or is not complete.
    """
    try:
        raw = np.memmap(path, np.uint8, "r")
        start = 8 + int(raw[:8].view("<u8")[0])
        header = json.loads(raw[8:start].tobytes())
        header.pop("__metadata__", None)
        return {name: tensor(raw[start:], **x) for name, x in header.items()}
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} is not a complete .safetensors file (is it a pointer of Git LFS, or cut "
            f"off by a download?): {error}"
        ) from error


def tensor(raw: np.ndarray, dtype: str, shape: list[int], data_offsets: list[int]) -> np.ndarray:
    """An array of the numbers that follow the header."""
    begin, end = data_offsets
    if dtype not in DTYPES:
        raise ValueError(f"the dtype {dtype} is not known; known: {', '.join(DTYPES)}.")
    if end > len(raw):
        raise ValueError(f"it must have {end} bytes after its header, got {len(raw)}.")
    return raw[begin:end].view(jnp.dtype(DTYPES[dtype])).reshape(shape)


INDEX = "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """The files that an index names, or `model.safetensors`, or the only others. Folders may hold
    the same weights a second time, under other names, as `consolidated.safetensors` of Mistral.

    **Raises:** `ValueError` if one is missing.
    """
    if (folder / INDEX).exists():
        names = set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())
    elif (folder / "model.safetensors").exists():
        names = {"model.safetensors"}
    else:
        names = {path.name for path in folder.glob("*.safetensors")}
    if not names:
        raise ValueError(f"{folder} has no *.safetensors.")
    paths = [folder / name for name in sorted(names)]
    if missing := [path.name for path in paths if not path.exists()]:
        raise ValueError(f"{folder} lacks files that {INDEX} names: {', '.join(missing)}.")
    return paths


def load_config(folder: Path) -> Config:
    """**Raises:** `ValueError` if there is none."""
    try:
        return json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} holds no model: {error}.") from error


def load(folder: Path, dtype: Any = jnp.float32) -> tuple[Decoder, Config]:
    """The decoder of a directory, and its config.

    **Raises:** `ValueError` if the directory has no such model.
    """
    config = load_config(folder)
    files = [read_tensors(path) for path in weight_files(folder)]
    tensors = {name: x for file in files for name, x in file.items()}
    return assemble(config, tensors, dtype), config


def random_decoder(config: Config, key: PRNGKeyArray, dtype: Any = jnp.float32) -> Decoder:
    """A decoder with random weights."""
    model = Decoder(read_spec(config), key)
    cast = lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x
    return jax.tree.map(cast, model)
