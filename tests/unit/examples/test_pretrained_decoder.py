"""Published families on eqattn compute what transformers computes, which `references/` holds."""

import json
import shutil
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _programs import refuses


pytest.importorskip("tokenizers", reason="tokenizers is not installed: it is in the tests extra")

import pretrained_decoder as example  # noqa: E402
import tokenizers  # noqa: E402
from pretrained.checkpoint import assemble, dequantised, load, read_tensors  # noqa: E402
from pretrained.decoder import empty_caches  # noqa: E402
from pretrained.families import read_spec  # noqa: E402
from pretrained.generation import Choice, generate  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402


REFERENCES = Path(__file__).parent / "references"
FAMILIES = sorted(path.name for path in REFERENCES.iterdir())
# One of each kind of layer. tests/nightly/examples has all families.
FEW = "deepseek_v3", "gemma3", "gpt_oss"
PROMPTS = 9, 5  # how many tokens of each row were continued


@pytest.fixture(autouse=True)
def quick_compilation():
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def reference(family):
    arrays = np.load(REFERENCES / family / "reference.npz")
    rows = [arrays[f"tokens/{i}"] for i in range(2)]
    return arrays, rows, [row[:n].tolist() for row, n in zip(rows, PROMPTS, strict=True)]


@pytest.mark.parametrize("family", FEW)
def test_logits_and_gradients(family):
    folder = REFERENCES / family
    config = json.loads((folder / "config.json").read_bytes())
    tensors = read_tensors(folder / "model.safetensors")
    tensors = {name: x.astype(np.float32) for name, x in tensors.items()}
    arrays, rows, _ = reference(family)
    lengths, longest = [len(row) for row in rows], max(map(len, rows))
    padded = np.stack([np.pad(row, (0, longest - len(row))) for row in rows])

    @jax.jit
    def run(tensors):
        def loss(tensors):
            logits = jax.vmap(assemble(config, tensors))(padded)
            log_p, new = jax.nn.log_softmax(logits[:, :-1]), jnp.asarray(padded[:, 1:])
            log_p = jnp.take_along_axis(log_p, new[..., None], -1)[..., 0]
            counted = np.arange(1, longest)[None] < np.array(lengths)[:, None]
            return -jnp.where(counted, log_p, 0.0).sum() / float(counted.sum()), logits

        return jax.grad(loss, has_aux=True)(tensors)

    gradients, logits = run(tensors)
    for i, n in enumerate(lengths):
        want = arrays[f"logits/{i}"]
        assert np.abs(logits[i, :n] - want).max() <= 1e-5 * max(1.0, np.abs(want).max())
    names = [name.removeprefix("gradient/") for name in arrays if name.startswith("gradient/")]
    assert len(names) >= len(tensors) - 1  # DeepSeek's correction of the choice has none
    for name in names:
        want = arrays[f"gradient/{name}"]
        assert np.abs(gradients[name] - want).max() <= 1e-4 * np.abs(want).max(), name


# Numbers of a config that change what is computed, and no shape.
NUMBERS = """rms_norm_eps layer_norm_epsilon rope_theta factor low_freq_factor high_freq_factor mscale
mscale_all_dim original_max_position_embeddings query_pre_attn_scalar attn_logit_softcapping
final_logit_softcapping sliding_window swiglu_alpha swiglu_limit routed_scaling_factor""".split()


def numbers(config, path=()):
    """The paths of those that a config has."""
    for name, x in config.items():
        if isinstance(x, dict):
            yield from numbers(x, (*path, name))
        elif name in NUMBERS and x is not None:
            yield (*path, name)


def test_which_numbers_configs_have():
    configs = [json.loads((REFERENCES / x / "config.json").read_bytes()) for x in FAMILIES]
    assert {path[-1] for config in configs for path in numbers(config)} == set(NUMBERS)


@pytest.mark.parametrize("family, kind", [("gemma3", "ring"), ("deepseek_v3", "contiguous")])
def test_generated_tokens(family, kind):
    arrays, _, prompts = reference(family)
    model, _ = load(REFERENCES / family)
    steps = generate(model, prompts, 12, kind=kind, piece=9 if kind == "ring" else 4)
    assert np.array_equal(np.array(list(steps)).T, arrays["ids"])


@pytest.mark.parametrize("strategy", ["ragged"])
def test_strategies_generate_the_same(strategy, capsys):
    arrays, _, prompts = reference("gemma3")
    texts = [" ".join(map(str, prompt)) for prompt in prompts]
    arguments = ["--length", "12", "--strategy", strategy, "--check", "--prompt", *texts]
    assert example.main([str(REFERENCES / "gemma3"), *arguments]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [list(map(int, out[i].split())) for i in (2, 4)] == arrays["ids"].tolist()
    assert out[-1] == "as full recomputation"


@pytest.mark.parametrize("family", ["llama"])
def test_eight_bits_change_logits_little(family):
    model, _ = load(REFERENCES / family)
    _, rows, _ = reference(family)
    tokens = np.stack([row[:13] for row in rows])
    logits = {}
    for kind in ("contiguous", "int8"):
        caches = empty_caches(model, 2, 13, 13, kind)
        _, logits[kind] = jax.jit(type(model).step)(model, caches, tokens)
    apart = jnp.linalg.norm(logits["int8"] - logits["contiguous"])
    assert 0 < apart < 0.02 * jnp.linalg.norm(logits["contiguous"])


def test_choices():
    logits, keys = jnp.array([1.0, 3.0, 2.0, -9.0]), jax.random.split(jax.random.key(0), 400)
    draw = lambda choice: np.asarray(jax.vmap(choice, (None, 0))(logits, keys))
    assert (draw(Choice()) == 1).all()
    assert (draw(Choice(1.0, top_k=1)) == 1).all()
    assert set(draw(Choice(1.0, top_k=2))) == {1, 2}
    # The likeliest has the probability 0.665, and with the second 0.91.
    assert (draw(Choice(1.0, top_p=0.6)) == 1).all()
    assert set(draw(Choice(1.0, top_p=0.7))) == {1, 2}
    shares = np.bincount(draw(Choice(2.0)), minlength=4) / 400
    assert np.abs(shares - jax.nn.softmax(logits / 2)).max() < 0.08  # three standard deviations


def test_a_text_stops_at_its_end(capsys):
    """The second row goes on when the first has ended, and tokens of the first are not shown."""
    arrays, _, prompts = reference("gemma3")
    ids = arrays["ids"].tolist()
    stop = next(x for x in ids[0] if x not in ids[1])
    model, _ = load(REFERENCES / "gemma3")
    got = list(generate(model, prompts, 12, piece=9, stop=[stop]))
    first = ids[0][: ids[0].index(stop) + 1]
    assert [x for x, _ in got] == first + [None] * (12 - len(first))
    assert [x for _, x in got] == ids[1]


def test_quantised_tensors():
    rng = np.random.default_rng(0)
    blocks, scales = (
        rng.integers(0, 256, (2, 3, 2, 16), np.uint8),
        rng.integers(120, 130, (2, 3, 2)),
    )
    got = dequantised({"x_blocks": blocks, "x_scales": scales.astype(np.uint8), "y": 1})
    assert got.keys() == {"x", "y"} and got["x"].shape == (2, 64, 3)
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values += [-x for x in values]
    for e, row, column in [(0, 0, 0), (1, 2, 33), (0, 1, 62), (1, 1, 31)]:
        byte = blocks[e, row, column // 32, column % 32 // 2]
        number = values[byte >> 4 if column % 2 else byte & 15]
        assert got["x"][e, column, row] == number * 2.0 ** (scales[e, row, column // 32] - 127)

    weight = jnp.asarray(rng.normal(size=(130, 200)), jnp.float8_e4m3fn)
    factors = rng.uniform(size=(2, 2)).astype(np.float32)
    got = dequantised({"w": np.asarray(weight), "w_scale_inv": factors})
    assert got.keys() == {"w"}
    for row, column in [(0, 0), (127, 128), (129, 127), (128, 199)]:
        want = np.float32(weight[row, column]) * factors[row // 128, column // 128]
        assert got["w"][row, column] == want


SIZES = dict(
    vocab_size=8,
    hidden_size=16,
    intermediate_size=8,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
)


def test_configs_from_before_transformers_5():
    scaling = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    scaling |= dict(original_max_position_embeddings=8192, rope_type="llama3")
    config = dict(SIZES, model_type="llama", rope_theta=5e5, rope_scaling=scaling)
    (rotary,) = {layer.rotary for layer in read_spec(config).layers}
    assert rotary.theta == 5e5 and rotary.scaling.factor == 8.0
    assert rotary.scaling.original_length == 8192

    config = dict(
        SIZES,
        model_type="gemma3",
        text_config=dict(
            SIZES,
            query_pre_attn_scalar=4,
            sliding_window=512,
            sliding_window_pattern=3,
            rope_theta=1e6,
            rope_local_base_freq=1e4,
            rope_scaling=dict(factor=8.0, rope_type="linear"),
        ),
    )
    layers = read_spec(config).layers
    assert [layer.window for layer in layers] == [511, 511, None] * 2
    assert [layer.rotary.theta for layer in layers] == [1e4, 1e4, 1e6] * 2
    assert layers[0].rotary.scaling is None and layers[2].rotary.scaling.factor == 8.0

    config = dict(SIZES, model_type="qwen2", sliding_window=8, max_window_layers=4)
    assert {layer.window for layer in read_spec(config).layers} == {None}
    config["use_sliding_window"] = True
    assert [layer.window for layer in read_spec(config).layers] == [None] * 4 + [7] * 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dict(model_type="mamba"), "model_type 'mamba' is not known; known: llama, mistral"),
        (
            dict(SIZES, model_type="llama", rope_scaling=dict(type="dynamic", factor=2.0)),
            "rope_type 'dynamic' is not known; known: default, linear, llama3, yarn.",
        ),
        (
            dict(SIZES, model_type="llama", hidden_act="relu2"),
            "the activation 'relu2' is not known",
        ),
        (dict(model_type="llama", vocab_size=8), "config.json lacks 'num_attention_heads'"),
        (dict(model_type="gpt2", vocab_size=8), "config.json lacks 'num_attention_heads'"),
    ],
)
def test_what_is_not_known_raises(config, message, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(config))
    refuses(example.main, [str(tmp_path), "--random"], message, capsys)


def test_tensors_must_be_those_of_the_model():
    folder = REFERENCES / "qwen3"
    config = json.loads((folder / "config.json").read_bytes())
    tensors = read_tensors(folder / "model.safetensors")
    with pytest.raises(ValueError, match="tensors that the model has not: .*odd"):
        assemble(config, tensors | {"odd": np.zeros(1)})
    del tensors["model.layers.1.self_attn.q_norm.weight"]
    with pytest.raises(ValueError, match=r"1.attention.query_norm.weight of shape \(4,\), got not"):
        assemble(config, tensors)


def shards(folder, tensors, count=2):
    """Writes tensors into files of an index, as published models of some size have them."""
    names = sorted(tensors)
    where = {
        name: f"model-0000{i % count + 1}-of-0000{count}.safetensors"
        for i, name in enumerate(names)
    }
    for path in set(where.values()):
        save_file({name: tensors[name] for name in names if where[name] == path}, folder / path)
    (folder / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=where)))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_files_of_an_index_and_no_others(tmp_path, dtype):
    """Mistral publishes the same weights a second time, under other names."""
    folder = REFERENCES / "mistral"
    shutil.copy(folder / "config.json", tmp_path)
    tensors = read_tensors(folder / "model.safetensors")
    tensors = {name: x.astype(np.float32).astype(dtype) for name, x in tensors.items()}
    shards(tmp_path, tensors)
    save_file({"layers.0.attention.wq.weight": np.ones(3)}, tmp_path / "consolidated.safetensors")
    model, _ = load(tmp_path)
    want = assemble(json.loads((folder / "config.json").read_bytes()), tensors)
    assert eqx.tree_equal(model, want)

    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="lacks files that .* names: model-00002-of-00002.safet"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a complete .safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a pointer of Git LFS"),
        (None, "bytes after its header, got"),
    ],
    ids=["empty", "pointer", "cut off"],
)
def test_files_that_are_damaged(tmp_path, content, message, capsys):
    folder = REFERENCES / "qwen3"
    shutil.copy(folder / "config.json", tmp_path)
    content = (folder / "model.safetensors").read_bytes()[:-9] if content is None else content
    (tmp_path / "model.safetensors").write_bytes(content)
    refuses(example.main, [str(tmp_path), "--prompt", "1"], message, capsys)


@pytest.mark.parametrize(
    ("family", "arguments", "message"),
    [
        (
            "qwen3",
            ["--prompt", "1 99"],
            "a prompt has the token 99; the model knows those below 32",
        ),
        ("qwen3", ["--prompt", "1", ""], "each prompt needs a token at least"),
        ("qwen3", ["--prompt", "hello"], "without a tokenizer.json, a prompt is numbers: 'hello'"),
        ("qwen3", ["--top-p", "0"], "--top-p is above 0 and at most 1"),
        ("gpt2", ["--length", "65"], "has learned 64 positions, and cannot take a text of 65 tok"),
    ],
)
def test_what_a_model_cannot_take(family, arguments, message, capsys):
    refuses(example.main, [str(REFERENCES / family), *arguments], message, capsys)


def test_a_call_beyond_the_learned_positions_raises():
    model, _ = load(REFERENCES / "gpt2")
    with pytest.raises(ValueError, match="64 positions, and cannot take a text of 65 tokens"):
        jax.eval_shape(model, jax.ShapeDtypeStruct((65,), np.int32))


def test_the_end_of_a_chat(tmp_path):
    """`config.json` of such a model has one end, `generation_config.json` has all."""
    assert example.end_tokens(tmp_path, dict(eos_token_id=3)) == [3]
    assert example.end_tokens(tmp_path, dict(eos_token_id=None)) == []
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 7]}')
    assert example.end_tokens(tmp_path, dict(eos_token_id=3)) == [3, 7]


def test_packed_numbers_that_are_not_known_raise():
    folder = REFERENCES / "qwen3"
    config = json.loads((folder / "config.json").read_bytes())
    tensors = read_tensors(folder / "model.safetensors")
    for packed in (
        dict(quant_method="gptq", bits=4),
        dict(quant_method="fp8", weight_block_size=[64, 64]),
    ):
        with pytest.raises(ValueError, match="is not known; known: mxfp4, and fp8 with blocks"):
            assemble(dict(config, quantization_config=packed), tensors)
    known = dict(quant_method="fp8", weight_block_size=[128, 128])
    assert eqx.tree_equal(
        assemble(dict(config, quantization_config=known), tensors), assemble(config, tensors)
    )


def test_gpt2_may_leave_the_scale_out():
    config = json.loads((REFERENCES / "gpt2" / "config.json").read_bytes())
    assert read_spec(config).scale is None
    assert read_spec(dict(config, scale_attn_weights=False)).scale == 1.0


def test_the_program_streams_a_text(tmp_path, capsys):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(REFERENCES / "qwen3" / name, tmp_path)
    letters = {x: i for i, x in enumerate("abcdefghijklmnopqrstuvwxyz .,!?-")}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert example.main([str(tmp_path), "--prompt", "hello", "--length", "8", "--check"]) == 0
    out, err = capsys.readouterr()
    model, _ = load(tmp_path)
    (steps,) = np.array(list(generate(model, [[letters[x] for x in "hello"]], 8))).T.tolist()
    assert out == "".join(list(letters)[x] for x in steps) + "\nas full recomputation\n"
    assert err.startswith("8 tokens, ")
