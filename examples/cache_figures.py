"""What a cache gains in generating text, and what eight bits per number cost.

    python examples/cache_figures.py                  # trains a small model in seconds, if needed
    python examples/cache_figures.py --model runs/language_model --context 2048

Speed: bytes a second after --context bytes, one at a time, with a cache and by computing the whole
text again for each. The weights are random; their values make no difference to it.

Quality: the logits of held-out text with an int8 cache, relative to those with bfloat16, and the
bits per byte of both.
"""

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import equinox as eqx
import generate
import jax
import jax.numpy as jnp
import language_model as lm
import numpy as np
import optax
from _run import Config
from _text import read_documents, split, windows_at
from jaxtyping import Array, Float, UInt8

from eqattn import AttentionMetadata, Blockwise
from eqattn.cache import AbstractCache, KVCache, QuantizedKVCache


def empty(kind: type, config: Config, rows: int, capacity: int, dtype: str) -> tuple:
    """A cache for each layer."""
    sizes = (rows, capacity, config.kv_heads, config.width // config.heads)
    return tuple(kind.empty(*sizes, dtype=dtype) for _ in range(config.layers))


# Speed -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Speed:
    """Bytes a second. `ratio` is the median of those of pairs that were measured in turn."""

    cached: float
    recomputed: float
    ratio: float


def speed(config: Config, context: int, rounds: int = 9, steps: int = 20) -> Speed:
    """Measures generation after `context` bytes, by the likeliest byte.

    **Arguments:**

    - `rounds`: pairs of measurements.
    - `steps`: bytes with the cache in each; the whole text is computed once in each.
    """
    model = lm.LanguageModel(config, jax.random.key(0))
    text = jnp.asarray(np.random.default_rng(0).integers(1, 256, (1, context), np.uint8))
    capacity = -(-(context + steps) // 256) * 256
    caches = empty(KVCache, config, 1, capacity, config.dtype)
    ones, full = jnp.ones(1, jnp.int32), jnp.full(1, context, jnp.int32)
    _, caches = eqx.filter_jit(generate.forward)(model, caches, text, full)

    def one(model, caches, byte):
        logits, caches = generate.forward(model, caches, byte, ones)
        return caches, jnp.argmax(logits[:, -1:], -1).astype(jnp.uint8)

    def again(model, text):
        strategy = Blockwise(AttentionMetadata(runtime_dtype=jnp.dtype(config.dtype)))
        new = jnp.argmax(model(text, strategy)[-1]).astype(jnp.uint8)
        return jnp.roll(text, -1).at[-1].set(new)

    one, again = jax.jit(one, donate_argnums=1), jax.jit(again)
    back = jax.jit(lambda caches: tuple(c.truncate(full) for c in caches), donate_argnums=0)
    byte, whole = text[:, -1:], text[0]
    times = []
    for _ in range(rounds + 1):  # the first compiles
        caches, began = back(caches), time.perf_counter()
        for _ in range(steps):
            caches, byte = one(model, caches, byte)
        byte.block_until_ready()
        middle = time.perf_counter()
        whole = again(model, whole).block_until_ready()
        times.append(((middle - began) / steps, time.perf_counter() - middle))
    cached, recomputed = np.array(times[1:]).T
    ratio = float(np.median(recomputed / cached))
    return Speed(1 / float(np.median(cached)), 1 / float(np.median(recomputed)), ratio)


# Quality ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Quality:
    """`error`: of the logits, relative, in the Euclidean norm. The others in bits per byte."""

    error: float
    bfloat16: float
    int8: float


@eqx.filter_jit
def with_cache(
    model: lm.LanguageModel, caches: tuple[AbstractCache, ...], windows: UInt8[Array, "n t+1"]
) -> tuple[Float[Array, "n t 256"], Float[Array, ""]]:
    """Logits of windows whose keys and values are read from the cache, and bits per byte."""
    n, length = windows.shape
    counts = jnp.full(n, length - 1, jnp.int32)
    logits, _ = generate.forward(model, caches, windows[:, :-1], counts)
    logits = logits.astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits, windows[:, 1:].astype(jnp.int32)
    )
    return logits, losses.mean() / math.log(2)


def quality(
    model: lm.LanguageModel, config: Config, held_out: UInt8[np.ndarray, "n"], size: int = 65_536
) -> Quality:
    """Measures on windows spread evenly over the text, `size` bytes in all."""
    context, rows = config.context, 16
    batches = max(1, size // (context * rows))
    starts = np.linspace(0, len(held_out) - context - 1, batches * rows).astype(int)
    model = lm.cast(model, "bfloat16")
    caches = [empty(k, config, rows, context, "bfloat16") for k in (KVCache, QuantizedKVCache)]
    apart, norm, bits = 0.0, 0.0, []
    for batch in starts.reshape(batches, rows):
        windows = jnp.asarray(windows_at(held_out, batch, context))
        (exact, a), (rounded, b) = (with_cache(model, c, windows) for c in caches)
        apart += float(jnp.sum(jnp.square(rounded - exact)))
        norm += float(jnp.sum(jnp.square(exact)))
        bits.append((float(a), float(b)))
    return Quality(math.sqrt(apart / norm), *np.mean(bits, axis=0).tolist())


# The program -----------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """The program. **Returns:** its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, default=Path("runs/generate"), help="folder of a checkpoint")
    add("--context", type=int, default=2048, help="bytes before (default %(default)s)")
    options = parser.parse_args(argv)
    if options.context < 1:
        parser.error("--context must be at least 1")
    model, config = generate.fetch(options.model, ["--quick"])
    _, held_out = split(read_documents(config.text and Path(config.text)))
    found = quality(model, config, held_out)
    print(
        f"int8 cache: logits differ by {found.error:.4f}; {found.int8:.4f} held-out bits per byte, "
        f"{found.bfloat16:.4f} with a bfloat16 cache",
        flush=True,
    )
    pace = speed(Config().complete(), options.context)
    print(
        f"after {options.context} bytes: {pace.cached:,.0f} bytes a second with a cache, "
        f"{pace.recomputed:,.1f} by full recomputation, {pace.ratio:.0f} times as many"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
