"""Takes an Equinox model that is trained already, and computes its attention another way.

    python examples/swap_strategy.py                  # half a minute on one CPU core

A small byte-level language model, written with `eqx.nn.MultiheadAttention` and no thought of
eqattn, learns the source of a module of Python's standard library. Then

1. `eqattn.nn.from_equinox` converts it, and the state of its optimiser, in place of every layer;
2. `eqattn.nn.with_strategy` swaps the strategy. Each strategy has the same loss;
3. it trains on, where it stopped;
4. the memory of the gradient of a block at a greater length is compared.
"""

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray, UInt8
from tqdm import tqdm

from eqattn import AttentionMetadata, Blockwise, Dense
from eqattn.nn import from_equinox, with_strategy


# The model, as anyone might have written it ----------------------------------------------------


class Block(eqx.Module):
    """Attention, then an MLP, each on the normalised sum of all before."""

    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, width: int, heads: int, key: PRNGKeyArray):
        first, second = jax.random.split(key)
        self.norms = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=first)
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=second)

    def __call__(self, x: Float[Array, "t width"]) -> Float[Array, "t width"]:
        normed = jax.vmap(self.norms[0])(x)
        mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
        x = x + self.attention(normed, normed, normed, mask)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class LanguageModel(eqx.Module):
    """Bytes in, logits of the next byte out."""

    embedding: eqx.nn.Embedding
    positions: Float[Array, "length width"]
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, length: int, width: int, heads: int, layers: int, key: PRNGKeyArray):
        keys = jax.random.split(key, layers + 3)
        self.embedding = eqx.nn.Embedding(256, width, key=keys[0])
        self.positions = 0.1 * jax.random.normal(keys[1], (length, width))
        self.blocks = [Block(width, heads, key) for key in keys[3:]]
        self.head = eqx.nn.Linear(width, 256, key=keys[2])

    def __call__(self, tokens: UInt8[Array, " t"]) -> Float[Array, "t 256"]:
        x = jax.vmap(self.embedding)(tokens) + self.positions[: len(tokens)]
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(x)


def loss_of(model: Any, windows: UInt8[Array, "n t+1"]) -> Float[Array, ""]:
    """The mean of predicting each byte of the windows from those before, in nats."""
    logits = jax.vmap(model)(windows[:, :-1])
    targets = windows[:, 1:].astype(jnp.int32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


OPTIMISER = optax.adam(2e-3)


@eqx.filter_jit
def step(model: Any, state: Any, windows: UInt8[Array, "n t+1"]) -> tuple[Any, Any, Array]:
    loss, gradients = eqx.filter_value_and_grad(loss_of)(model, windows)
    updates, state = OPTIMISER.update(gradients, state)
    return eqx.apply_updates(model, updates), state, loss


def train(
    model: Any, state: Any, text: UInt8[np.ndarray, " n"], context: int, steps: range, title: str
) -> tuple[Any, Any]:
    """Trains in the given steps; which bytes a step sees depends on its number only."""
    with tqdm(steps, title, unit="step") as bar:
        for i in bar:
            starts = np.random.default_rng(i).integers(len(text) - context, size=8)
            windows = text[starts[:, None] + np.arange(context + 1)]
            model, state, loss = step(model, state, windows)
            bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
    return model, state


# What is done to it ----------------------------------------------------------------------------


def strategies(model: LanguageModel) -> dict[str, Any]:
    """The model, converted, with a strategy each."""
    converted = from_equinox(model)
    small = AttentionMetadata(blocksize_q=32, blocksize_k=16)
    return {
        "eqx.nn.MultiheadAttention": model,
        "eqattn, default": converted,
        "eqattn, Blockwise 32 x 16": with_strategy(converted, Blockwise(small)),
        "eqattn, Dense": with_strategy(converted, Dense(AttentionMetadata())),
    }


def gradient_memory(model: LanguageModel, length: int) -> float:
    """MiB of temporary memory that XLA plans for the gradient of a block at this length."""
    block = model.blocks[0]
    x = jnp.zeros((length, model.positions.shape[1]))
    gradient = eqx.filter_grad(lambda block, x: block(x).sum())
    compiled = eqx.filter_jit(gradient).lower(block, x).compile().compiled
    return compiled.memory_analysis().temp_size_in_bytes / 2**20


def main(argv: Sequence[str] | None = None) -> int:
    """The program. **Returns:** its exit status: 1 if results disagree."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60, help="of training (default %(default)s)")
    parser.add_argument("--context", type=int, default=128, help="bytes (default %(default)s)")
    parser.add_argument("--long", type=int, default=2048, help="bytes (default %(default)s)")
    options = parser.parse_args(argv)
    if options.steps < 2 or options.context < 1 or options.long < 1:
        parser.error("--steps must be at least 2, --context and --long at least 1")

    text = np.frombuffer(Path(textwrap.__file__).read_bytes(), np.uint8)
    if len(text) <= options.context:
        parser.error(f"--context must be less than the {len(text)} bytes of the text")
    model = LanguageModel(options.context, 64, 4, 2, jax.random.key(0))
    state = OPTIMISER.init(eqx.filter(model, eqx.is_inexact_array))
    half = options.steps // 2
    first, rest = range(half), range(half, options.steps)
    model, state = train(model, state, text, options.context, first, "with Equinox's layer")

    windows = text[np.arange(16)[:, None] * 64 % (len(text) - options.context)
                   + np.arange(options.context + 1)]  # fmt: skip
    evaluate = eqx.filter_jit(loss_of)
    variants = strategies(model)
    print(f"{'':28}{'loss':>10}{f'MiB at {options.long}':>16}")
    losses = []
    for name, variant in variants.items():
        losses.append(float(evaluate(variant, windows)))
        memory = gradient_memory(variant, options.long)
        print(f"{name:28}{losses[-1]:10.6f}{memory:16.1f}", flush=True)

    converted = train(
        variants["eqattn, default"], from_equinox(state), text, options.context, rest, "converted"
    )[0]
    stayed = train(model, state, text, options.context, rest, "not converted")[0]
    ends = [float(evaluate(m, windows)) for m in (stayed, converted)]
    print(f"after {options.steps} steps: {ends[0]:.6f} not converted, {ends[1]:.6f} converted")
    agree = np.ptp(losses) < 1e-5 and abs(ends[0] - ends[1]) < 1e-3
    print("losses agree" if agree else "losses disagree")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
