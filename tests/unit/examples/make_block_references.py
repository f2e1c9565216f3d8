"""Makes `blocks.npz`: what transformers' blocks compute that `docs/pages/encoders.md` writes anew.

    python -m pip install torch transformers
    python tests/unit/examples/make_block_references.py

As `make_references.py`, it is needed only to make the file anew.
"""

from pathlib import Path

import numpy as np
import torch
import transformers


FILE = Path(__file__).parent / "blocks.npz"
SIZES = dict(hidden_size=16, intermediate_size=24, num_attention_heads=4, vocab_size=32)
LENGTHS = 11, 7


def models():
    bert = transformers.BertConfig(**SIZES, num_hidden_layers=1, max_position_embeddings=32)
    yield "bert", transformers.BertModel(bert), lambda m: m.encoder.layer[0]
    modern = transformers.ModernBertConfig(
        **SIZES,
        num_hidden_layers=3,
        local_attention=4,
        global_attn_every_n_layers=3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    )
    yield "modernbert", transformers.ModernBertModel(modern), lambda m: m.layers[1]
    whisper = transformers.WhisperConfig(
        vocab_size=32,
        d_model=16,
        decoder_attention_heads=4,
        encoder_attention_heads=4,
        decoder_ffn_dim=24,
        encoder_ffn_dim=24,
        encoder_layers=1,
        decoder_layers=1,
        num_mel_bins=4,
        max_source_positions=12,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    yield "whisper", transformers.WhisperModel(whisper), lambda m: m.decoder.layers[0]


def main() -> None:
    arrays = {"lengths": np.array(LENGTHS)}
    for name, model, block_of in models():
        torch.manual_seed(0)
        model.set_attn_implementation("eager")
        model.eval()
        block, seen = block_of(model), {}
        with torch.no_grad():
            for key, x in block.named_parameters():
                around = 1.0 if key.lower().endswith("norm.weight") else 0.0
                x.copy_(around + 0.3 * torch.randn(x.shape))

        def hook(_, inputs, options, output, seen=seen):
            """Keeps the input and the output, and the encoder's output: the third argument."""
            seen["in"] = inputs[0]
            seen["encoder"] = options.get("encoder_hidden_states", (*inputs, None, None)[2])
            seen["out"] = output[0] if isinstance(output, tuple) else output

        block.register_forward_hook(hook, with_kwargs=True)
        tokens = torch.randint(3, 32, (len(LENGTHS), max(LENGTHS)))
        with torch.no_grad():
            if name == "whisper":
                model(input_features=torch.randn(2, 4, 24), decoder_input_ids=tokens)
                arrays["whisper/encoder"] = seen["encoder"].numpy()
            else:
                mask = (torch.arange(max(LENGTHS))[None] < torch.tensor(LENGTHS)[:, None]).long()
                model(input_ids=tokens, attention_mask=mask)
        arrays |= {f"{name}/{part}": seen[part].numpy() for part in ("in", "out")}
        arrays |= {f"{name}/{key}": x.detach().numpy() for key, x in block.named_parameters()}
    np.savez_compressed(FILE, **arrays)
    print({key: x.shape for key, x in arrays.items()}, FILE.stat().st_size)


if __name__ == "__main__":
    main()
