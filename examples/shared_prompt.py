"""Draws several samples of one prompt, as training by GRPO does, from a cache of latents.

    python examples/shared_prompt.py
    python examples/shared_prompt.py --samples 16 --new 64

The model has DeepSeek's attention and random weights. Its caches hold a latent for each token, in
pages. The prompt is read once, by one row; the rows of the samples then share its pages, and get a
copy of the last one when they first write. The logits of the last step are compared with those of
whole texts without a cache.
"""

import argparse
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from eqattn.cache import LatentKVCache, PagedKVCache
from eqattn.nn import LatentAttention, Rotary


LAYERS, WIDTH, HEADS, PAGE = 2, 64, 4, 16
SIZES = dict(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)


class Model(eqx.Module):
    """Bytes in, logits of the next byte out."""

    embedding: Float[Array, "256 width"]
    layers: tuple[LatentAttention, ...]

    def __init__(self, key):
        first, *keys = jax.random.split(key, LAYERS + 1)
        rotary = Rotary(interleaved=True)
        self.embedding = jax.random.normal(first, (256, WIDTH))
        self.layers = tuple(
            LatentAttention(HEADS, WIDTH, **SIZES, rotary=rotary, key=k) for k in keys
        )

    def __call__(self, text: UInt8[Array, "t"]) -> Float[Array, "t 256"]:
        x = self.embedding[text]
        for layer in self.layers:
            x = x + layer(x, "causal")
        return x @ self.embedding.T / WIDTH

    def step(self, caches, new: UInt8[Array, "rows t"], counts: Int[Array, "rows"]):
        """The caches after `counts` of the new bytes of each row, and the logits after each."""
        x, after = self.embedding[new], []
        for layer, cache in zip(self.layers, caches, strict=True):
            cache, out = layer(x, "causal", cache=cache, counts=counts)
            x = x + out
            after.append(cache)
        return tuple(after), x @ self.embedding.T / WIDTH


class Figures(NamedTuple):
    """`pages` are those in use at the end, `apart` those without sharing, of a layer. `numbers` are
    those that a layer keeps of a token, `expanded` those of keys and values of all heads.
    """

    pages: int
    apart: int
    numbers: int
    expanded: int
    error: float
    texts: list[bytes]


@eqx.filter_jit(donate="all-except-first")
def advance(model, caches, new, counts):
    return model.step(caches, new, counts)


def draw(prompt: bytes, samples: int, new: int, seed: int = 0) -> Figures:
    """Draws `samples` texts of `new` bytes after a prompt."""
    model = Model(jax.random.key(seed))
    capacity, rank, rest = len(prompt) + new, SIZES["kv_lora_rank"], SIZES["qk_rope_head_dim"]
    pages = -(-capacity // PAGE) * samples
    caches = [
        PagedKVCache.empty(samples, capacity, pages, PAGE, 1, rest, rank) for _ in range(LAYERS)
    ]
    first = np.array([len(prompt)] + [0] * (samples - 1), np.int32)
    text = (
        jnp.zeros((samples, len(prompt)), jnp.uint8).at[0].set(jnp.array(list(prompt), jnp.uint8))
    )
    latents = tuple(LatentKVCache(cache.reserve(first)) for cache in caches)
    latents, logits = advance(model, latents, text, jnp.asarray(first))
    others = list(range(1, samples))
    latents = tuple(LatentKVCache(x.cache.share(others, 0, len(prompt))) for x in latents)
    last, drawn = jnp.broadcast_to(logits[:1, -1], (samples, 256)), []
    for key in jax.random.split(jax.random.key(seed + 1), new):
        drawn.append(jax.random.categorical(key, last).astype(jnp.uint8))
        latents = tuple(LatentKVCache(x.cache.reserve(1)) for x in latents)
        one = jnp.ones(samples, jnp.int32)
        latents, logits = advance(model, latents, drawn[-1][:, None], one)
        last = logits[:, -1]
    texts = jnp.concatenate([jnp.repeat(text[:1], samples, 0), jnp.stack(drawn, 1)], 1)
    whole = jax.jit(jax.vmap(model))(texts)[:, -1]
    table = np.asarray(latents[0].cache.key.table)[:, : -(-capacity // PAGE)]
    return Figures(
        pages=len(np.unique(table)),
        apart=table.size,
        numbers=rank + rest,
        expanded=HEADS * (SIZES["qk_nope_head_dim"] + rest + SIZES["v_head_dim"]),
        error=float(abs(whole - last).max() / abs(whole).max()),
        texts=[bytes(x) for x in np.asarray(texts)],
    )


def main(arguments: list[str] | None = None) -> Figures:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, text = parser.add_argument, "Attention is a sum over pairs. " * 4
    add("--prompt", default=text, help="start of every sample (default: a sentence four times)")
    add("--samples", type=int, default=8, help="rows that share it (default %(default)s)")
    add("--new", type=int, default=24, help="bytes drawn for each (default %(default)s)")
    given = parser.parse_args(arguments)
    if not given.prompt or min(given.samples, given.new) < 1:
        parser.error("--prompt needs a byte, and --samples and --new are at least 1")
    found = draw(given.prompt.encode(), given.samples, given.new)
    print(f"pages in use: {found.pages}, without sharing {found.apart}")
    print(f"numbers kept of a token: {found.numbers}, of all heads {found.expanded}")
    print(f"last logits differ from those without a cache by {found.error:.1e}")
    return found


if __name__ == "__main__":
    main()
