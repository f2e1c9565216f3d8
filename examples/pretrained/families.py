"""Translates the `config.json` of published families into a `Spec`.

Each family is a function that returns what differs from `llama`, the fields that all have.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx

from eqattn.nn import LinearScaling, Llama3Scaling, Rotary, YaRNScaling

from .spec import Latent, Layer, Mixture, Spec


Config = Mapping[str, Any]


def rotary(config: Config, dim: int, kind: str | None = None) -> Rotary:
    """The rotary embedding of a config, in the form before and after transformers 5; `kind` is that
    of the layer, where kinds differ.
    """
    given = dict(config.get("rope_parameters") or {})
    given = dict(given.get(kind) or given)
    if not given:
        given = dict(config.get("rope_scaling") or {})
    theta = given.get("rope_theta", config.get("rope_theta", 10_000.0))
    name = given.get("rope_type", given.get("type", "default"))
    pick = lambda *names: {x: given[x] for x in names if given.get(x) is not None}
    original = given.get("original_max_position_embeddings")
    if name == "default":
        scaling = None
    elif name == "linear":
        scaling = LinearScaling(given["factor"])
    elif name == "llama3":
        bounds = pick("low_freq_factor", "high_freq_factor")
        scaling = Llama3Scaling(given["factor"], **bounds, original_length=original)
    elif name == "yarn":
        factor, mscale = given["factor"], given.get("mscale")
        options = pick("beta_fast", "beta_slow", "attention_factor", "truncate")
        if "attention_factor" not in options and mscale and given.get("mscale_all_dim"):
            options["attention_factor"] = yarn_mscale(factor, mscale) / yarn_mscale(
                factor, given["mscale_all_dim"]
            )
        scaling = YaRNScaling(factor, original or config["max_position_embeddings"], **options)
    else:
        raise ValueError(f"rope_type {name!r} is not known; known: default, linear, llama3, yarn.")
    part = given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    turned = int(dim * part)
    return Rotary(theta, scaling=scaling, dim=None if turned == dim else turned)


def yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def layers(config: Config, slides: Callable[[int], bool], **same: Any) -> tuple[Layer, ...]:
    """The layers, of which those of the type `sliding_attention` have a window. `slides` says which
    these are if the config doesn't.
    """
    count, window = config["num_hidden_layers"], config.get("sliding_window")
    kinds = config.get("layer_types") or [
        "sliding_attention" if window and slides(i) else "full_attention" for i in range(count)
    ]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    # A window of n in these configs is a query's own key and the n - 1 before it.
    return tuple(
        Layer(
            window - 1 if kind == "sliding_attention" else None,
            rotary(config, head_dim, kind),
            **same,
        )
        for kind in kinds
    )


def llama(config: Config) -> dict[str, Any]:
    """Llama, and what all families have in common with it."""
    heads, width = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or width // heads
    bias = config.get("attention_bias", False)
    return dict(
        vocabulary=config["vocab_size"],
        width=width,
        hidden=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        layers=layers(dict(config, layer_types=None), lambda i: False),
        eps=config.get("rms_norm_eps", 1e-6),
        activation=activation(config.get("hidden_act", "silu")),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.get("mlp_bias", False),
        tied=config.get("tie_word_embeddings", False),
    )


def activation(name: str) -> str:
    known = {"silu": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh"}
    known["gelu_pytorch_tanh"] = "gelu_tanh"
    if name not in known:
        raise ValueError(f"the activation {name!r} is not known; known: {', '.join(known)}.")
    return known[name]


def mistral(config: Config) -> dict[str, Any]:
    return dict(layers=layers(dict(config, layer_types=None), lambda i: True))


def qwen2(config: Config) -> dict[str, Any]:
    first = config.get("max_window_layers", 0)
    slides = lambda i: bool(config.get("use_sliding_window")) and i >= first
    return dict(layers=layers(config, slides), qkv_bias=True, output_bias=False)


def qwen3(config: Config) -> dict[str, Any]:
    bias = config.get("attention_bias", False)
    return qwen2(config) | dict(qk_norm="head", qkv_bias=bias, output_bias=bias)


def gemma2(config: Config) -> dict[str, Any]:
    if config.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention is not supported: this is a decoder.")
    # A file without the field means the tied embeddings that all published ones have.
    return dict(
        layers=layers(config, lambda i: i % 2 == 0),
        norms="both",
        activation=activation(config.get("hidden_activation") or "gelu_pytorch_tanh"),
        scale=config["query_pre_attn_scalar"] ** -0.5,
        soft_cap=config.get("attn_logit_softcapping"),
        final_cap=config.get("final_logit_softcapping"),
        embedding_scale=config["hidden_size"] ** 0.5,
        tied=config.get("tie_word_embeddings", True),
    )


def gemma3(config: Config) -> dict[str, Any]:
    every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    if not config.get("rope_parameters"):  # the form before transformers 5
        full = dict(config.get("rope_scaling") or {}, rope_theta=config.get("rope_theta", 1e6))
        local = dict(rope_theta=config.get("rope_local_base_freq", 1e4))
        config = dict(config, rope_parameters=dict(full_attention=full, sliding_attention=local))
    common = gemma2(config)
    return common | dict(layers=layers(config, lambda i: (i + 1) % every != 0), qk_norm="head")


def gpt_oss(config: Config) -> dict[str, Any]:
    mixture = Mixture(
        config["num_local_experts"],
        config["num_experts_per_tok"],
        config["intermediate_size"],
        clamp=(config.get("swiglu_alpha", 1.702), config.get("swiglu_limit", 7.0)),
    )
    bias = config.get("attention_bias", True)
    return dict(
        layers=layers(config, lambda i: i % 2 == 0, experts=True),
        qkv_bias=bias,
        output_bias=bias,
        sinks=True,
        mixture=mixture,
    )


def olmo2(config: Config) -> dict[str, Any]:
    return dict(norms="after", qk_norm="width")


def smollm3(config: Config) -> dict[str, Any]:
    count, every = config["num_hidden_layers"], config.get("no_rope_layer_interval", 4)
    turns = config.get("no_rope_layers") or [(i + 1) % every for i in range(count)]
    slides = lambda i: bool(config.get("use_sliding_window")) and not turns[i]
    all_ = zip(layers(config, slides), turns, strict=False)
    return dict(
        layers=tuple(x if turn else dataclasses.replace(x, rotary=None) for x, turn in all_),
        tied=config.get("tie_word_embeddings", True),
    )


def gpt2(config: Config) -> dict[str, Any]:
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if config.get(name):
            raise ValueError(f"{name} is not supported.")
    return dict(
        layers=(Layer(),) * config["n_layer"],
        eps=config.get("layer_norm_epsilon", 1e-5),
        norm=eqx.nn.LayerNorm,
        activation=activation(config.get("activation_function", "gelu_new")),
        gated=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        tied=config.get("tie_word_embeddings", True),
        learned_positions=config["n_positions"],
        scale=None if config.get("scale_attn_weights", True) else 1.0,
    )


def llama_names(config: Config) -> Config:
    """A config of GPT-2, under the names of others."""
    names = dict(hidden_size="n_embd", num_hidden_layers="n_layer", num_attention_heads="n_head")
    names |= dict(intermediate_size="n_inner")
    known = {x: config[y] for x, y in names.items() if config.get(y) is not None}
    return dict(intermediate_size=4 * config.get("n_embd", 0)) | dict(config) | known


def deepseek(config: Config) -> dict[str, Any]:
    rank, dim = config["kv_lora_rank"], config["qk_rope_head_dim"]
    bias, plain = config.get("attention_bias", False), config["qk_nope_head_dim"]
    common, interleaved = rotary(config, dim), config.get("rope_interleave", True)
    turned = Rotary(common.theta, scaling=common.scaling, dim=dim, interleaved=interleaved)
    scale, given = (dim + plain) ** -0.5, config.get("rope_parameters") or {}
    given = given or config.get("rope_scaling") or {}
    if given.get("rope_type", given.get("type", "default")) != "default":
        scale *= yarn_mscale(given["factor"], given.get("mscale_all_dim") or 0) ** 2
    dense = config.get("first_k_dense_replace", 0)
    hidden = config["moe_intermediate_size"]
    return dict(
        layers=tuple(
            Layer(None, turned, experts=i >= dense) for i in range(config["num_hidden_layers"])
        ),
        scale=scale,
        latent=Latent(config.get("q_lora_rank"), rank, dim, plain, config["v_head_dim"], bias),
        mixture=Mixture(
            config["n_routed_experts"],
            config["num_experts_per_tok"],
            hidden,
            hidden * (config.get("n_shared_experts") or 0),
            (config.get("n_group") or 1, config.get("topk_group") or 1),
            config.get("norm_topk_prob", True),
            config.get("routed_scaling_factor", 1.0),
        ),
    )


# A family's own fields, and how its config is read like that of Llama.
FAMILIES: dict[str, Callable[[Config], dict[str, Any]]] = {
    "llama": lambda config: {},
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "gpt_oss": gpt_oss,
    "olmo2": olmo2,
    "smollm3": smollm3,
    "gpt2": gpt2,
    "deepseek_v3": deepseek,
}


def text_config(config: Config) -> Config:
    """The config of the language model, under Llama's names.

    **Raises:** `ValueError` for a family that is not known.
    """
    if config.get("model_type") == "gemma3":  # with images: only its decoder is read
        config = dict(config["text_config"], model_type="gemma3_text")
    name = config.get("model_type")
    if name not in FAMILIES:
        raise ValueError(f"model_type {name!r} is not known; known: {', '.join(FAMILIES)}.")
    return llama_names(config) if name == "gpt2" else config


def read_spec(config: Config) -> Spec:
    """**Raises:** `ValueError` for a family, or for a part of one, that is not known."""
    config = text_config(config)
    try:
        return Spec(**llama(config) | FAMILIES[config["model_type"]](config))
    except KeyError as error:
        raise ValueError(
            f"config.json lacks {error.args[0]!r}, which such a model needs."
        ) from error
