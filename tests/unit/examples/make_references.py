"""Makes `references/`: a tiny random checkpoint of each family, and what transformers computes.

    python -m pip install torch transformers
    python tests/unit/examples/make_references.py [family ...]

Needed only to make them anew. The tests read the files and need neither package. Each folder has
`config.json` and `model.safetensors` as transformers saves them, in bfloat16, and `reference.npz`
with what transformers computes from them in float32: logits of two rows of unequal length, the
gradient of their mean loss by each tensor of the checkpoint, and ids that are generated greedily
from a batch padded on the left.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers


FOLDER = Path(__file__).parent / "references"
LENGTHS, PROMPTS, NEW = (20, 13), (9, 5), 12
SIZES = dict(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=12,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    max_position_embeddings=64,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
    rms_norm_eps=0.02,  # so large that another one shows in the logits
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
YARN = dict(rope_type="yarn", rope_theta=500.0, factor=8.0, original_max_position_embeddings=16)

# The model of each family, and what is not as in SIZES.
FAMILIES = {
    "llama": (
        "Llama",
        dict(head_dim=8, rope_parameters=LLAMA3, tie_word_embeddings=True, mlp_bias=True),
    ),
    "mistral": ("Mistral", dict(sliding_window=6)),
    "qwen2": ("Qwen2", dict(use_sliding_window=True, sliding_window=6, max_window_layers=1)),
    "qwen3": ("Qwen3", dict(tie_word_embeddings=True)),
    "gemma2": (
        "Gemma2",
        dict(
            sliding_window=6,
            query_pre_attn_scalar=12,
            attn_logit_softcapping=3.0,
            final_logit_softcapping=5.0,
        ),
    ),
    "gemma3": (
        "Gemma3",
        dict(
            sliding_window=6,
            query_pre_attn_scalar=12,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={
                "sliding_attention": dict(rope_type="default", rope_theta=100.0),
                "full_attention": dict(rope_type="linear", rope_theta=1000.0, factor=4.0),
            },
        ),
    ),
    "gpt_oss": (
        "GptOss",
        dict(
            head_dim=8,
            sliding_window=6,
            num_local_experts=4,
            num_experts_per_tok=2,
            swiglu_limit=0.7,
            # So long that the ends of the ramp, which are not rounded here, lie between two pairs.
            rope_parameters=dict(YARN, truncate=False, original_max_position_embeddings=48),
        ),
    ),
    "olmo2": ("Olmo2", {}),
    "smollm3": ("SmolLM3", dict(no_rope_layer_interval=2)),
    "gpt2": (
        "GPT2",
        dict(
            n_embd=16,
            n_layer=2,
            n_head=4,
            n_inner=12,
            n_positions=64,
            tie_word_embeddings=True,
            layer_norm_epsilon=0.02,
        ),
    ),
    "deepseek_v3": (
        "DeepseekV3",
        dict(
            num_key_value_heads=4,
            q_lora_rank=8,
            kv_lora_rank=12,
            qk_nope_head_dim=6,
            qk_rope_head_dim=8,
            v_head_dim=6,
            first_k_dense_replace=1,
            n_routed_experts=6,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            moe_intermediate_size=8,
            num_nextn_predict_layers=0,
            rope_parameters=dict(YARN, mscale=1.0, mscale_all_dim=0.7),
        ),
    ),
}


def build(name: str, seed: int):
    """A model with random weights, large enough that every part of it shows in the logits."""
    kind, options = FAMILIES[name]
    wanted = SIZES | options
    if name == "gpt2":
        wanted = {key: x for key, x in wanted.items() if key in options or key.endswith("_id")}
        wanted["vocab_size"] = SIZES["vocab_size"]
    if name in ("olmo2", "deepseek_v3"):  # theirs follows from other sizes
        del wanted["head_dim"]
    text = "Text" if name == "gemma3" else ""
    config = getattr(transformers, f"{kind}{text}Config")(**wanted)
    head = "GPT2LMHeadModel" if name == "gpt2" else f"{kind}ForCausalLM"
    torch.manual_seed(seed)
    model = getattr(transformers, head)(config)
    state = model.state_dict()
    for key, x in state.items():
        if not x.is_floating_point():
            continue
        around = 1.0 if key.endswith("norm.weight") or ".ln_" in key or "ln_f" in key else 0.0
        around = 0.0 if name in ("gemma2", "gemma3") else around  # these add 1 themselves
        size = 0.3 if x.ndim < 2 else 1.2 * x.shape[-1] ** -0.5
        size = 0.5 if "embed_tokens" in key or "wte" in key else size
        size = 1.0 if "wpe" in key else size
        if key in ("model.norm.weight", "transformer.ln_f.weight"):
            around, size = 0.0, 1.0  # of either sign, or tied models repeat their last token
        x.copy_(around + size * torch.randn(x.shape))
    model.load_state_dict(state)
    return model.to(torch.bfloat16)


def rows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 32, (n,), generator=generator) for n in LENGTHS]


def gradients(model) -> dict[str, np.ndarray]:
    """By the names of the checkpoint, in which each expert of DeepSeek has tensors of its own."""
    found = {}
    for key, x in model.named_parameters():
        if x.grad is None:
            continue
        stem, _, part = key.rpartition(".experts.")
        if not stem or x.ndim < 3 or model.config.model_type != "deepseek_v3":
            found[key] = x.grad.numpy()
            continue
        for i, expert in enumerate(x.grad):
            names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
            for name, piece in zip(names, expert.chunk(len(names)), strict=True):
                found[f"{stem}.experts.{i}.{name}.weight"] = piece.numpy()
    return found


def make(name: str, seed: int) -> tuple[float, int]:
    """Writes the folder of a family. **Returns:** the least margin of a token that was chosen, and
    how many different tokens each row has at least.
    """
    folder = FOLDER / name
    build(name, seed).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    model.eval()
    logits = [model(input_ids=row[None]).logits[0] for row in rows()]
    losses = [
        torch.nn.functional.cross_entropy(x[:-1], row[1:], reduction="sum")
        for x, row in zip(logits, rows(), strict=True)
    ]
    (sum(losses) / (sum(LENGTHS) - len(LENGTHS))).backward()
    longest = max(PROMPTS)
    prompts = torch.zeros((len(PROMPTS), longest), dtype=torch.long)
    seen = torch.zeros_like(prompts)
    for i, (row, n) in enumerate(zip(rows(), PROMPTS, strict=True)):
        prompts[i, longest - n :], seen[i, longest - n :] = row[:n], 1
    out = model.generate(
        prompts,
        attention_mask=seen,
        max_new_tokens=NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(out.logits).topk(2, -1).values
    arrays = {f"logits/{i}": x.detach().numpy() for i, x in enumerate(logits)}
    arrays |= {f"tokens/{i}": row.numpy().astype(np.int32) for i, row in enumerate(rows())}
    arrays["ids"] = out.sequences[:, longest:].numpy().astype(np.int32)
    arrays |= {f"gradient/{key}": x for key, x in gradients(model).items()}
    np.savez_compressed(folder / "reference.npz", **arrays)
    config = json.loads((folder / "config.json").read_text())
    config.pop("transformers_version", None)
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    margin = float((best[..., 0] - best[..., 1]).min())
    return margin, min(len(set(row)) for row in arrays["ids"].tolist())


if __name__ == "__main__":
    for family in sys.argv[1:] or FAMILIES:
        # A token that is chosen by a hair would test rounding, and equal ones nothing.
        for seed in range(40):
            margin, different = make(family, seed)
            if margin > 0.02 and different > 3:
                break
        size = sum(path.stat().st_size for path in (FOLDER / family).iterdir())
        print(f"{family}: seed {seed}, margin {margin:.3f}, {size:,} bytes", flush=True)
