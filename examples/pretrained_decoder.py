"""Runs published language models on eqattn: any directory in Hugging Face's format.

    python examples/pretrained_decoder.py path/to/model --prompt "The capital of France is"
    python examples/pretrained_decoder.py path/to/model --dtype bfloat16 --temperature 0.8
    python examples/pretrained_decoder.py path/to/model --cache int8 --check

The directory holds config.json, *.safetensors and tokenizer.json of a Llama, Mistral, Qwen 2 or 3,
Gemma 2 or 3, gpt-oss, OLMo 2, SmolLM 3, GPT-2 or DeepSeek V3 model. Nothing is downloaded. Without
a tokenizer, prompts and texts are numbers. `--check` computes each text again without a cache and
compares. `--compare` times a step with a cache against computing the whole text again.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from pretrained.checkpoint import load, load_config, random_decoder
from pretrained.decoder import Decoder, empty_caches
from pretrained.families import Config
from pretrained.generation import advance, Choice, generate
from tokenizers import Tokenizer

from eqattn import AttentionRegistry
from eqattn.nn import with_strategy


class Text:
    """Between texts and tokens. Without a file, a text is numbers with spaces between them."""

    def __init__(self, folder: Path):
        path = folder / "tokenizer.json"
        try:
            self.tokenizer = Tokenizer.from_file(str(path)) if path.exists() else None
        except Exception as error:  # the package raises this class itself
            raise ValueError(f"{path} is no tokenizer: {error}") from error

    def encode(self, text: str) -> list[int]:
        if self.tokenizer is not None:
            return self.tokenizer.encode(text).ids
        try:
            return [int(x) for x in text.split()]
        except ValueError as error:
            raise ValueError(f"without a tokenizer.json, a prompt is numbers: {text!r}") from error

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens) if self.tokenizer else "".join(f"{x} " for x in tokens)


def end_tokens(folder: Path, config: Config) -> list[int]:
    """The tokens that end a text. Models for chats have more in `generation_config.json`."""
    path = folder / "generation_config.json"
    more = json.loads(path.read_bytes()) if path.exists() else {}
    found = more.get("eos_token_id", config.get("eos_token_id"))
    return found if isinstance(found, list) else [] if found is None else [found]


def stream(text: Text, steps: Any, rows: int) -> tuple[list[list[int]], list[float]]:
    """Prints the text of a single row as it grows. **Returns:** the tokens of all rows, and when
    each step was done.
    """
    tokens: list[list[int]] = [[] for _ in range(rows)]
    shown, times = "", [time.perf_counter()]
    for step in steps:
        for row, token in enumerate(step):
            if token is not None:
                tokens[row].append(token)
        times.append(time.perf_counter())
        whole = text.decode(tokens[0])
        # The first bytes of a character are decoded to this sign until the rest has come.
        if rows == 1 and not whole.endswith("�"):
            print(whole[len(shown) :], end="", flush=True)
            shown = whole
    print()
    return tokens, times


def recomputed(model: Decoder, prompt: list[int], new: list[int]) -> list[int]:
    """The likeliest tokens after each, without a cache, given the text that it follows."""
    logits = jax.jit(lambda model, x: model(x))(model, jnp.asarray(prompt + new[:-1]))
    return np.asarray(jnp.argmax(logits, -1))[len(prompt) - 1 :].tolist()


def compare(model: Decoder, length: int, kind: str, pairs: int = 7) -> tuple[float, float, float]:
    """The milliseconds of a step with a cache of `length` tokens, those of computing the `length`
    tokens again, and the median of their ratios, one after the other in pairs.
    """
    piece, tokens = 64, np.arange(length) % len(model.embedding)
    caches = empty_caches(model, 1, length + pairs + 2, piece, kind)
    one, key = np.ones(1, np.int32), jax.random.key(0)
    for start in range(0, length, piece):
        part = tokens[None, start : start + piece]
        caches, _ = advance(model, caches, part, one * part.shape[1], key, Choice())
    whole = jax.jit(lambda model, x: model.logits(model.hidden(x)[-1:]))
    times = np.zeros((pairs + 1, 2))
    for i in range(pairs + 1):  # the first compiles
        start = time.perf_counter()
        caches, new = advance(model, caches, tokens[None, :1], one, key, Choice())
        jax.block_until_ready(new)
        middle = time.perf_counter()
        jax.block_until_ready(whole(model, tokens))
        times[i] = middle - start, time.perf_counter() - middle
    with_cache, without = np.median(times[1:], 0) * 1e3
    return with_cache, without, float(np.median(times[1:, 1] / times[1:, 0]))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", type=Path, help="folder of the model")
    add("--prompt", nargs="+", help="starts of texts, computed together")
    add("--length", type=int, default=100, help="tokens after each (default %(default)s)")
    add("--cache", choices=["contiguous", "ring", "int8"], default="ring",
        help="ring keeps of layers with a window what it shows, int8 has eight bits for the others "
        "(default %(default)s)")  # fmt: skip
    add("--piece", type=int, default=64, help="tokens of a prompt in one step")
    add("--strategy", help="how attention is computed: a name in AttentionRegistry")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="to compute in")
    add("--temperature", type=float, default=0.0, help="0: always the likeliest token")
    add("--top-k", type=int, default=0, help="sample from so many tokens, 0: from all")
    add("--top-p", type=float, default=1.0, help="sample from so much probability")
    add("--seed", type=int, default=0, help="of the samples, and of --random")
    add("--random", action="store_true", help="random weights: only config.json is read")
    add("--check", action="store_true", help="compare with what full recomputation gives")
    add(
        "--compare", type=int, metavar="TOKENS", help="time a step after so many tokens, do no more"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The program. **Returns:** its exit status: 1 if results disagree."""
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.check and (options.temperature or options.cache == "int8"):
        parser.error("--check needs --temperature 0, and a cache that does not round")
    if min(options.length, options.piece) < 1 or options.top_k < 0 or options.temperature < 0:
        parser.error("--length and --piece are at least 1, --top-k and --temperature at least 0")
    if not 0 < options.top_p <= 1:
        parser.error("--top-p is above 0 and at most 1")
    if options.compare is not None and options.compare < 1:
        parser.error("--compare is at least 1")
    try:
        if options.random:
            config = load_config(options.model)
            model = random_decoder(config, jax.random.key(options.seed), options.dtype)
        else:
            model, config = load(options.model, options.dtype)
        if options.strategy is not None:
            model = with_strategy(model, AttentionRegistry.create(options.strategy))
        if options.compare:
            step, whole, ratio = compare(model, options.compare, options.cache)
            print(f"a step after {options.compare} tokens: {step:.2f} ms with a cache, ", end="")
            print(f"{whole:.2f} ms without, {ratio:.1f} times as long")
            return 0
        text = Text(options.model)
        texts = options.prompt or ["The" if text.tokenizer else "1"]
        prompts = [text.encode(x) for x in texts]
        steps = generate(
            model,
            prompts,
            options.length,
            kind=options.cache,
            piece=options.piece,
            choice=Choice(options.temperature, options.top_k, options.top_p),
            key=jax.random.key(options.seed),
            stop=end_tokens(options.model, config),
        )
    except ValueError as error:
        parser.error(str(error))
    tokens, times = stream(text, steps, len(prompts))
    if len(prompts) > 1:
        for prompt, new in zip(texts, tokens, strict=True):
            print(f"--- {prompt}\n{text.decode(new)}")
    count = sum(map(len, tokens))
    # The prompt and the first two tokens compile the two programs.
    rate = len(prompts) * (len(times) - 3) / (times[-1] - times[2]) if len(times) > 3 else 0.0
    print(f"{count} tokens, {rate:,.1f} a second after compiling", file=sys.stderr)
    if options.check:
        pairs = zip(prompts, tokens, strict=True)
        wrong = [
            i for i, (prompt, new) in enumerate(pairs) if recomputed(model, prompt, new) != new
        ]
        print(f"differs from full recomputation: {wrong}" if wrong else "as full recomputation")
        return bool(wrong)
    return 0


if __name__ == "__main__":
    sys.exit(main())
