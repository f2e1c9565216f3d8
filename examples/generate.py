"""Serves the language model: several prompts at once, through a paged cache.

    python examples/generate.py    # the model that language_model.py trained, or a small one
    python examples/generate.py --prompt "import " "def " "class A"
    python examples/generate.py --draft runs/draft --model runs/language_model  # speculative

Rows join and leave: as soon as a text has ended, its pages are free and the next prompt takes its
row. Prompts enter in pieces, all rows then advance by a byte a step, each with its own length. With
--draft a smaller model guesses bytes ahead, and the model checks all guesses of a step at once: the
text is the same, in fewer steps. --check computes every text again without a cache and compares.
"""

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import language_model as lm
import numpy as np
from _run import Config, load, resolve
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt8
from tqdm import tqdm

from eqattn import attention, AttentionMetadata, Blockwise, Causal, Ragged
from eqattn.cache import PagedKVCache


PIECE = 32  # bytes of prompts that enter in one step
PAGE = 32  # bytes in a page


# The model, with caches ------------------------------------------------------------------------


Caches = tuple[PagedKVCache, ...]  # of the layers, all with the same lengths and pages


def no_text(config: Config, rows: int, capacity: int) -> Caches:
    """With fewer pages than all rows could need at once: the long texts of some leave room for the
    short ones of others, or a prompt waits.
    """
    most = -(-capacity // PAGE)
    pages = most * (rows + 1) // 2
    dim = config.width // config.heads
    cache = PagedKVCache.empty(rows, capacity, pages, PAGE, config.kv_heads, dim)
    return tuple(jax.tree.map(jnp.copy, cache) for _ in range(config.layers))


def forward(
    model: lm.LanguageModel,
    caches: Caches,
    tokens: UInt8[Array, "rows t"],
    counts: Int[Array, "rows"],
) -> tuple[Float[Array, "rows t 256"], Caches]:
    """Logits after each of the new bytes, of which row `i` takes the first `counts[i]`."""
    offset = caches[0].length
    positions = offset[:, None] + jnp.arange(tokens.shape[1])
    x, new = model.embedding[tokens], []
    strategy = Ragged(AttentionMetadata(runtime_dtype=x.dtype))
    for block, cache in zip(model.blocks, caches, strict=True):
        query, key_, value = jax.vmap(block.project)(x, positions)
        cache = cache.append(key_, value, counts)
        mask = Causal() & cache.mask()
        out = attention(query, cache.key, cache.value, strategy, mask=mask, q_offset=offset)
        x = jax.vmap(block.finish)(x, out.attention_outputs)
        new.append(cache)
    logits = jax.vmap(jax.vmap(lambda x: model.head(model.norm(x))))(x)
    return logits, tuple(new)


# Choosing bytes --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Choice:
    """How a byte is chosen: the likeliest at temperature 0, else sampled from the `top_k`
    likeliest, and of these from the fewest that have the probability `top_p`.
    """

    temperature: float = 0.0
    top_k: int = 256
    top_p: float = 1.0

    def __call__(self, logits: Float[Array, "256"], key: PRNGKeyArray) -> UInt8[Array, ""]:
        if self.temperature == 0:
            return jnp.argmax(logits).astype(jnp.uint8)
        order = jnp.argsort(-logits)
        logits = logits[order] / self.temperature
        p = jax.nn.softmax(logits)
        before = jnp.cumsum(p) - p
        kept = (jnp.arange(256) < self.top_k) & (before < self.top_p)
        return order[jax.random.categorical(key, jnp.where(kept, logits, -jnp.inf))].astype(
            jnp.uint8
        )


# Steps -----------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=5, donate_argnums=1)
def advance(
    model: lm.LanguageModel,
    caches: Caches,
    tokens: UInt8[Array, "rows t"],
    counts: Int[Array, "rows"],
    key: PRNGKeyArray,
    choice: Choice,
) -> tuple[Caches, UInt8[Array, "rows"]]:
    """Takes `counts` bytes into each row, and chooses the one after."""
    logits, caches = forward(model, caches, tokens, counts)
    last = logits[jnp.arange(len(logits)), jnp.maximum(counts - 1, 0)]
    return caches, jax.vmap(choice)(last, jax.random.split(key, len(last)))


@functools.partial(jax.jit, static_argnums=4, donate_argnums=1)
def speculate(
    models: tuple[lm.LanguageModel, lm.LanguageModel],
    both: tuple[Caches, Caches],
    tokens: UInt8[Array, "rows"],
    live: Bool[Array, "rows"],
    ahead: int,
) -> tuple[tuple[Caches, Caches], UInt8[Array, "rows t"], Int[Array, "rows"]]:
    """The second model guesses `ahead` bytes, the first checks them in one step.

    **Returns:** the caches, the first model's own bytes after `tokens` `[rows, ahead + 1]`, and how
    many of them are new: as many as were guessed right, and one. They are what it alone would
    choose.
    """
    (caches, guessing), one = both, live.astype(jnp.int32)
    start = caches[0].length

    def guess(carry, _):
        guessing, tokens = carry
        logits, guessing = forward(models[1], guessing, tokens[:, None], one)
        new = jnp.argmax(logits[:, 0], -1).astype(jnp.uint8)
        return (guessing, new), new

    (guessing, last), guesses = jax.lax.scan(guess, (guessing, tokens), None, length=ahead)
    _, guessing = forward(models[1], guessing, last[:, None], one)
    asked = jnp.concatenate([tokens[None], guesses]).T
    logits, caches = forward(models[0], caches, asked, one * (ahead + 1))
    own = jnp.argmax(logits, -1).astype(jnp.uint8)
    right = jnp.cumprod(own[:, :-1] == asked[:, 1:], axis=1).sum(1).astype(jnp.int32)
    new = one * (right + 1)
    both = tuple(tuple(c.truncate(start + new) for c in part) for part in (caches, guessing))
    return both, own, new


# Serving ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class Request:
    """A text that grows in a row of the batch."""

    prompt: bytes
    length: int
    new: bytes = b""

    @property
    def ended(self) -> bool:
        return len(self.new) >= self.length


@dataclasses.dataclass
class Server:
    """Rows that requests join and leave."""

    models: tuple[lm.LanguageModel, ...]  # the one that is served, and maybe one that guesses
    caches: tuple[Caches, ...]
    ahead: int
    choice: Choice
    key: PRNGKeyArray
    steps: int = 0
    guessed: int = 0
    right: int = 0

    def run(self, requests: Sequence[Request], rows: int) -> Iterator[tuple[int, bytes]]:
        """Serves all. **Yields:** the number of a request, and its next bytes."""
        waiting, at = list(range(len(requests)))[::-1], [-1] * rows
        last = np.zeros(rows, np.uint8)
        while waiting or max(at) >= 0:
            joined = [row for row in range(rows) if at[row] < 0]
            for row in joined:
                at[row] = (
                    waiting.pop() if waiting and self.fits(requests[waiting[-1]], row, at) else -1
                )
            joined = [row for row in joined if at[row] >= 0]
            if joined:
                prompts = {row: b"\0" + requests[at[row]].prompt for row in joined}
                for row, byte in self.enter(prompts, rows).items():
                    last[row] = byte
                    yield at[row], self.grow(requests[at[row]], bytes([byte]))
            live = np.array([i >= 0 and not requests[i].ended for i in at])
            if live.any():
                for row, new in self.step(last, live).items():
                    last[row] = new[-1]
                    yield at[row], self.grow(requests[at[row]], new)
            ended = [row for row in range(rows) if at[row] >= 0 and requests[at[row]].ended]
            if ended:
                self.each(lambda cache: cache.release(jnp.array(ended)))
                for row in ended:
                    at[row] = -1

    @staticmethod
    def grow(request: Request, new: bytes) -> bytes:
        new = new[: request.length - len(request.new)]
        request.new += new
        return new

    def each(self, change: Any) -> None:
        """Changes all caches."""
        self.caches = tuple(tuple(map(change, part)) for part in self.caches)

    def fits(self, request: Request, row: int, at: list[int]) -> bool:
        """Reserves pages for a whole request, if there are enough."""
        more = np.zeros(len(at), int)
        more[row] = 1 + len(request.prompt) + request.length + self.ahead
        try:
            self.each(lambda cache: cache.reserve(more))
        except ValueError:
            if max(at) < 0:  # no row will ever end
                raise
            return False  # until another row has ended
        return True

    def enter(self, prompts: dict[int, bytes], rows: int) -> dict[int, int]:
        """Takes prompts in. **Returns:** the first new byte of each."""
        first = {}
        for start in range(0, max(map(len, prompts.values())), PIECE):
            tokens, counts = np.zeros((rows, PIECE), np.uint8), np.zeros(rows, np.int32)
            for row, prompt in prompts.items():
                piece = prompt[start : start + PIECE]
                tokens[row, : len(piece)], counts[row] = np.frombuffer(piece, np.uint8), len(piece)
            new = self.advance(tokens, counts)
            for row, prompt in prompts.items():
                if counts[row] and start + PIECE >= len(prompt):
                    first[row] = int(new[row])
        return first

    def advance(self, tokens: Any, counts: Any) -> np.ndarray:
        self.key, key = jax.random.split(self.key)
        self.steps += 1
        parts = zip(self.models, self.caches, strict=True)
        results = [advance(m, c, tokens, counts, key, self.choice) for m, c in parts]
        self.caches = tuple(caches for caches, _ in results)
        return np.asarray(results[0][1])

    def step(self, last: np.ndarray, live: np.ndarray) -> dict[int, bytes]:
        """The next bytes of each live row: one, or with a draft up to `ahead + 1`."""
        if len(self.models) == 1:
            new = self.advance(last[:, None], live.astype(np.int32))
            return {row: bytes([new[row]]) for row in np.flatnonzero(live)}
        self.steps += 1
        self.caches, own, counts = speculate(self.models, self.caches, last, live, self.ahead)
        own, counts = np.asarray(own), np.asarray(counts)
        self.guessed += int(live.sum()) * self.ahead
        self.right += int((counts - live).sum())
        return {row: own[row, : counts[row]].tobytes() for row in np.flatnonzero(live)}


# The program -----------------------------------------------------------------------------------


def recomputed(model: lm.LanguageModel, request: Request) -> bytes:
    """What the model chooses without a cache, given the text that it follows."""
    text = np.frombuffer(b"\0" + request.prompt + request.new, np.uint8)
    strategy = Blockwise(AttentionMetadata(runtime_dtype=jnp.float32))
    logits = eqx.filter_jit(model)(jnp.asarray(text[:-1]), strategy)
    return np.asarray(jnp.argmax(logits, -1), np.uint8)[len(request.prompt) :].tobytes()


def fetch(folder: Path, quick: Sequence[str]) -> tuple[lm.LanguageModel, Config]:
    """The model of a checkpoint. If there is none, a small one is trained first."""
    path = folder / "checkpoint.eqx"
    if not path.exists():
        print(f"{path} does not exist: training a small model", flush=True)
        lm.main(["--out", str(folder), "--sample", "1", *quick])
    options = lm.make_parser("").parse_args(["--out", str(folder)])
    config, _ = resolve(options, path)
    return load(path, lm.create_state(config)).model, config


def trained() -> Path:
    """The folder of the model that the README's first command trained, if it is there."""
    folder = Path("runs/language_model")
    return folder if (folder / "checkpoint.eqx").exists() else Path("runs/generate")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    prompts = [
        "import ",
        "def main(",
        "class Error(",
        '    """Return the ',
        "from collections import ",
    ]
    found = "runs/language_model if language_model.py trained one there, else runs/generate"
    add("--model", type=Path, help=f"folder of a checkpoint (default: {found})")
    add("--draft", type=Path, help="folder of a smaller model's checkpoint, to guess ahead")
    add("--ahead", type=int, default=4, help="bytes that it guesses (default %(default)s)")
    add("--prompt", nargs="+", default=prompts, help="starts of texts")
    add("--length", type=int, default=200, help="bytes after each (default %(default)s)")
    add("--rows", type=int, default=3, help="texts at a time (default %(default)s)")
    greedy = "0: always the likeliest byte (default: 0 with --check or --draft, else 0.7)"
    add("--temperature", type=float, help=greedy)
    add("--top-k", type=int, default=256, help="sample from so many bytes (default %(default)s)")
    add("--top-p", type=float, default=1.0, help="sample from so much probability")
    add("--seed", type=int, default=0, help="of the samples")
    add("--check", action="store_true", help="compare with what full recomputation gives")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The program. **Returns:** its exit status."""
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.temperature is None:
        options.temperature = 0.0 if options.check or options.draft else 0.7
    if (options.check or options.draft) and options.temperature:
        parser.error("--check and --draft need --temperature 0")
    for name in ("ahead", "length", "rows", "top_k"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if options.temperature < 0 or not 0 < options.top_p <= 1:
        parser.error("--temperature must be at least 0, and --top-p above 0 and at most 1")
    model, config = fetch(options.model or trained(), ["--quick"])
    requests = [Request(p.encode(), options.length) for p in options.prompt]
    ahead = options.ahead if options.draft else 0
    capacity = 1 + max(len(r.prompt) for r in requests) + options.length + ahead
    models = [(model, config)]
    if options.draft:
        models.append(fetch(options.draft, ["--quick", "--layers", "1", "--width", "32"]))
    caches = tuple(no_text(sizes, options.rows, capacity) for _, sizes in models)
    choice = Choice(options.temperature, options.top_k, options.top_p)
    key = jax.random.key(options.seed)
    server = Server(tuple(m for m, _ in models), caches, ahead, choice, key)
    began, total = time.monotonic(), sum(r.length for r in requests)
    with tqdm(total=total, unit="byte", dynamic_ncols=True) as bar:
        for number, new in server.run(requests, options.rows):
            bar.update(len(new))
            if requests[number].ended:
                text = (requests[number].prompt + requests[number].new).decode(errors="replace")
                tqdm.write(f"--- {number}\n{text}", file=sys.stdout)
    seconds = time.monotonic() - began
    print(f"{total} bytes in {server.steps} steps, {total / seconds:,.0f} a second with compiling")
    if options.draft:
        print(f"accepted {server.right} of {server.guessed} guesses")
    if options.check:
        wrong = [i for i, r in enumerate(requests) if recomputed(model, r) != r.new]
        print(f"differs from full recomputation: {wrong}" if wrong else "as full recomputation")
        return bool(wrong)
    return 0


if __name__ == "__main__":
    sys.exit(main())
