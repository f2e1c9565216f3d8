"""A tour of masks and scores, ready-made and your own, each compared with all logits in memory.

    python examples/custom_mask_and_score.py           # under a minute on one CPU core
    python examples/custom_mask_and_score.py --draw    # with a picture of each mask

A mask says which keys a query sees, a score what a visible pair is worth. Both are functions of one
pair: its batch element, head and positions, and whatever arrays travel with queries and keys.
Nothing else is written: the blocks that can be skipped follow from the mask's function, gradients
from the score's. The table shows the share of skipped blocks, and how far results and gradients are
from those of a plain softmax over a matrix of logits, to which every case is written out again.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float
from tqdm import tqdm

from eqattn import (
    ALiBi,
    attention,
    AttentionMetadata,
    Blockwise,
    Causal,
    MaskFn,
    ScoreFn,
    Segments,
    SlidingWindow,
)
from eqattn.masks import AbstractMask
from eqattn.scores import Operand


BATCH, HEADS, KV_HEADS, DIM = 2, 4, 2, 32
BLOCKS = 16  # along queries and along keys
TOLERANCE = 1e-5  # of the largest element


# Your own --------------------------------------------------------------------------------------


def landmarks(b, h, q, k):
    """Every query sees the first 16 keys of each 256, and its own surroundings."""
    return (k % 256 < 16) | (q - k < 32)


def by_head(b, h, q, k):
    """The first half of the heads looks near, the other half everywhere."""
    return (h >= HEADS // 2) | (q - k < 64)


def recent(b, h, q, k, now, then):
    """What happened in the minute before, for events at irregular times."""
    return (then <= now) & (now - then < 60.0)


class Fading(eqx.Module):
    """The logit falls with the logarithm of the distance, as fast as each head learns."""

    speed: Float[Array, " heads"]

    def __call__(self, logit, b, h, q, k):
        return logit - self.speed[h] * jnp.log1p(jnp.abs(q - k).astype(logit.dtype))


def weighed(logit, b, h, q, k, weight):
    """Some keys are worth more than others, whoever asks."""
    return logit + weight


# The cases -------------------------------------------------------------------------------------


Indices = Sequence[np.ndarray]  # b, h, q, k, which broadcast to [batch, heads, queries, keys]


class Case(NamedTuple):
    """A mask and scores, and the same again, written for whole arrays."""

    name: str
    mask: AbstractMask
    visible: Callable[[Indices], Bool[np.ndarray, "..."]]
    score: Callable[[Any], Any] = lambda learned: None
    worth: Callable[[Any, Array, Indices], Array] = lambda learned, logits, at: logits
    learned: Any = None
    soft_cap: float | None = None


def cases(t: int) -> list[Case]:
    """All cases, for sequences of `t` tokens."""
    rng = np.random.default_rng(0)
    ends = np.sort(rng.choice(np.arange(1, t - 1), (BATCH, 4), replace=False))
    documents = np.stack([np.searchsorted(row, np.arange(t), "right") for row in ends])
    documents = np.where(documents == 4, -1, documents).astype(np.int32)  # the rest is padding
    times = np.cumsum(rng.exponential(1000 / t, (BATCH, t)), axis=1).astype(np.float32)
    keys = rng.normal(size=(BATCH, t)).astype(np.float32)
    alibi = ALiBi.geometric(HEADS)
    window = t // 8

    def causal(at):
        return at[3] <= at[2]

    def same_document(at):
        rows, cols = documents[:, None, :, None], documents[:, None, None, :]
        return causal(at) & (rows == cols) & (rows >= 0)

    def distance(at):
        return np.abs(at[2] - at[3]).astype(np.float32)

    def just_before(at):
        now, then = times[:, None, :, None], times[:, None, None, :]
        return (then <= now) & (now - then < np.float32(60))

    return [
        Case("causal", Causal(), causal),
        Case(
            "sliding window and sinks",
            Causal() & SlidingWindow(window - 1, 0, sinks=4),
            lambda at: causal(at) & ((at[2] - at[3] < window) | (at[3] < 4)),
        ),
        Case("packed documents", Causal() & Segments(documents), same_document),
        Case(
            "yours: landmarks",
            Causal() & MaskFn(landmarks),
            lambda at: causal(at) & ((at[3] % 256 < 16) | (at[2] - at[3] < 32)),
        ),
        Case(
            "yours: by head",
            Causal() & MaskFn(by_head),
            lambda at: causal(at) & ((at[2] - at[3] < 64) | (at[1] >= HEADS // 2)),
        ),
        Case("yours: a minute back", MaskFn(recent, (times,), (times,)), just_before),
        Case(
            "soft cap",
            Causal(),
            causal,
            worth=lambda _, logits, at: 5 * jnp.tanh(logits / 5),
            soft_cap=5.0,
        ),
        Case(
            "ALiBi, its slopes learned",
            Causal(),
            causal,
            score=lambda alibi: alibi,
            worth=lambda alibi, logits, at: (
                logits - alibi.slopes[None, :, None, None] * distance(at)
            ),
            learned=alibi,
        ),
        Case(
            "yours: fading, learned",
            Causal(),
            causal,
            score=ScoreFn,
            worth=lambda fading, logits, at: (
                logits - fading.speed[None, :, None, None] * np.log1p(distance(at))
            ),
            learned=Fading(jnp.linspace(0.0, 1.0, HEADS)),
        ),
        Case(
            "yours: keys weighed, learned",
            Causal() & Segments(documents),
            same_document,
            score=lambda weights: ScoreFn(weighed, [Operand(weights, "bs")]),
            worth=lambda weights, logits, at: logits + weights[:, None, None, :],
            learned=jnp.asarray(keys),
        ),
    ]


def ours(case: Case, t: int) -> Callable[..., Array]:
    """The function of what is learned, query, key and value that eqattn computes."""
    block = max(1, t // BLOCKS)
    metadata = AttentionMetadata(
        blocksize_q=block, blocksize_k=block, logits_soft_cap=case.soft_cap
    )

    def fn(learned, query, key_, value):
        score = case.score(learned)
        return attention(
            query, key_, value, Blockwise(metadata), mask=case.mask, score=score
        ).attention_outputs

    return fn


def reference(case: Case, t: int) -> Callable[..., Array]:
    """The same function, with all logits in memory."""
    at = np.ogrid[:BATCH, :HEADS, :t, :t]
    visible = np.broadcast_to(case.visible(at), (BATCH, HEADS, t, t))

    def fn(learned, query, key_, value):
        key_, value = (x.repeat(HEADS // KV_HEADS, axis=2) for x in (key_, value))
        logits = jnp.einsum("bthd,bshd->bhts", query, key_) / float(np.sqrt(DIM))
        logits = jnp.where(visible, case.worth(learned, logits, at), -1e30)
        top = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
        weights = jnp.where(visible, jnp.exp(logits - top), 0.0)
        total = weights.sum(-1, keepdims=True)
        weights = weights / jnp.where(total == 0, 1.0, total)  # padding sees nothing: 0
        return jnp.einsum("bhts,bshd->bthd", weights, value)

    return fn


@jax.default_matmul_precision("highest")
def difference(case: Case, t: int) -> tuple[float, float]:
    """How far the result is from the reference's at most, and the gradients of all arguments, each
    as a part of the largest element.
    """
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(BATCH, t, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    *args, cotangent = (jax.random.normal(k, n) for k, n in zip(keys, shapes, strict=True))

    def both(fn):
        @jax.jit
        def run(*args):
            out, pull = jax.vjp(fn, *args)
            return out, pull(cotangent)

        return run(case.learned, *args)

    out, wanted = both(ours(case, t)), both(reference(case, t))
    relative = lambda x, y: jnp.abs(x - y).max() / jnp.abs(y).max()
    output, gradients = jax.jit(lambda x, y: jax.tree.map(relative, x, y))(out, wanted)
    return float(output), max(map(float, jax.tree.leaves(gradients)))


def main(argv: Sequence[str] | None = None) -> int:
    """The program. **Returns:** its exit status: 1 if results disagree."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tokens", type=int, default=1024, help="of a sequence (default %(default)s)")
    add("--draw", action="store_true", help="draw the masks")
    add("--quick", action="store_true", help="with 256 tokens")
    options = parser.parse_args(argv)
    if options.tokens < BLOCKS:
        parser.error(f"--tokens must be at least {BLOCKS}, got {options.tokens}")
    t = 256 if options.quick else options.tokens
    block = t // BLOCKS
    print(f"{t} tokens, blocks of {block} x {block}; largest relative differences")
    print(f"{'':32}{'skipped':>8}{'output':>10}{'gradients':>11}")
    agree = True
    with tqdm(cases(t), "cases", unit="case") as bar:
        for case in bar:
            skipped = case.mask.sparsity(
                t, t, block_q=block, block_k=block, batch_shape=(BATCH,), heads=HEADS
            ).empty
            apart = difference(case, t)
            agree &= max(apart) < TOLERANCE
            row = f"{case.name:32}{skipped:8.0%}{apart[0]:10.1e}{apart[1]:11.1e}"
            bar.write(f"{case.mask}\n{row}\n" if options.draw else row, sys.stdout)
    print("all agree" if agree else "some disagree")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
