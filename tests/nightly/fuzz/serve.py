"""Random histories of caches against a list of events: `python tests/nightly/fuzz/serve.py --cases 200`.

A history appends, truncates, reorders, shares, releases and saves. Each append asks attention with a
random mask, random scores and a random strategy. What the cache holds, outputs, logsumexps and
gradients of all that was ever appended are compared with NumPy's float64.
"""

import argparse
import sys
from pathlib import Path
from typing import Any


if __name__ == "__main__":
    sys.path[:0] = [str(p) for p in Path(__file__).parents[1:3]]
    import conftest  # noqa: F401  Flags of XLA, and the strict rules of the suite.

import equinox as eqx  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from eqattn.cache import AbstractStored  # noqa: E402
from fuzz._history import Answer, attend, Call, History, Tokens, turned  # noqa: E402
from fuzz._plans import Config, draw_steps, fresh, PAGED, Static, Step  # noqa: E402
from fuzz._serving import donated, jitted, on_layers, saved, stepped  # noqa: E402


class Mismatch(AssertionError):
    """What differs, and where."""


def wide(x: Any) -> np.ndarray:
    return np.asarray(x if x.dtype == jnp.float64 else x.astype(jnp.float32), float)


def contents(config: Config, held: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """The keys and values that each layer of a cache holds, in float64."""

    def plain(x):
        x = x.materialise() if isinstance(x, AbstractStored) else x
        return wide(jnp.asarray(x))

    found = []
    on_layers(held, config.latent, lambda i, c: (c, found.append((plain(c.key), plain(c.value)))))
    return found


def rounding(config: Config, x: np.ndarray) -> np.ndarray:
    """By how much 8 bits may change vectors `[..., d]`."""
    if config.kind not in ("quantized", "paged int8"):
        return np.zeros_like(x)
    kind = jnp.dtype(config.stored)
    if kind == jnp.int8:
        return np.broadcast_to(abs(x).max(-1, keepdims=True) / 127 * 0.51, x.shape)
    info = jnp.finfo(kind)
    scale = abs(x).max(-1, keepdims=True) / float(info.max)
    return abs(x) * float(info.eps) * 0.51 + scale * float(info.smallest_subnormal)


class Runner:
    """Runs the steps of a history, by eqattn and by NumPy."""

    def __init__(self, config: Config, steps: list[Step], rng: np.random.Generator):
        self.config, self.steps = config, steps
        self.inputs = {i: fresh(rng, config, s) for i, s in enumerate(steps) if s.op == "append"}
        self.wanted = {
            i: rng.normal(size=(*q.shape[:3], config.value_dim))
            for i, (q, _, _) in self.inputs.items()
        }
        self.extra = [int(x) for x in rng.integers(0, 3, len(steps))]
        self.strategies = [
            config.strategy(bitwise=config.bitwise, fused_backward=bool(x))
            for x in rng.integers(0, 2, len(steps))
        ]
        self.block_q = int(rng.integers(1, 8))
        self.learned: dict[str, Any] = {}  # numbers of the metadata, where gradients are taken
        self.tracing = False  # whether gradients are on their way, so that nothing can be saved

    def apply(self, held: Any, i: int, inputs: Any, mode: str | None = None) -> tuple[Any, Any]:
        """One step by eqattn: the cache, and the results of attention."""
        step, config = self.steps[i], self.config
        if step.op != "append":
            return self.changed(held, step), None
        given = step.arguments
        counts = None if given["whole"] else jnp.asarray(given["counts"], jnp.int32)
        if config.kind in PAGED:
            room = (
                config.places - held.length.max(0)
                if held.length.ndim > 1
                else config.places - held.length
            )
            more = np.minimum(np.asarray(given["counts"]) + self.extra[i], np.asarray(room))
            held = held.reserve(more.astype(np.int32))
        more: dict[str, Any] = {}
        if given["way"] == "packed":
            more = dict(starts=jnp.asarray(given["starts"]), block_q=jnp.zeros(self.block_q))
        if given["by_place"]:
            more["by_place"] = jnp.zeros(())
        if "positions" in given:
            more["positions"] = jnp.asarray(given["positions"])
        if given["way"] == "layer":
            turning = given["turned"] or (-1, False)
            more["layer"] = Static((*turning, given["window"]))
        elif given.get("turned"):
            more["turned"] = Static(given["turned"])
        if given["way"] == "spread":
            more["spread"] = Static(given["spread"])
        q, keys, values = inputs
        strategy = self.strategies[i]
        if self.learned:
            metadata = strategy.metadata.replace(**self.learned)
            strategy = eqx.tree_at(lambda x: x.metadata, strategy, metadata)
        call = (q, keys, values, counts, given["mask"], given["scores"], strategy, more)
        mode = given["mode"] if mode is None else mode
        run = dict(jit=jitted, donate=donated, eager=stepped)[mode]
        return run(
            held, call, way=given["way"], latent=config.latent, causal=given.get("causal", True),
            layer=given["layer"],
        )  # fmt: skip

    def changed(self, held: Any, step: Step) -> Any:
        given = step.arguments
        if step.op == "saved":
            return held if self.tracing else saved(held)
        if step.op in ("release", "share"):
            if step.op == "release":
                return held.release(jnp.asarray(given["rows"], jnp.int32))
            return held.share(given["rows"], given["from_row"], given["tokens"])
        array = jnp.asarray(next(iter(given.values())), jnp.int32)
        held, _ = on_layers(
            held, self.config.latent, lambda _, c: (getattr(c, step.op)(array), None)
        )
        return held

    def check(self) -> None:
        """**Raises:** `Mismatch` where eqattn and NumPy differ."""
        config, held = self.config, self.config.make()
        wraps = config.capacity if config.kind == "ring" else None
        history = History.of(config.batch, wraps)
        tokens = [Tokens() for _ in range(config.layers)]
        gradients: dict[str, Any] = {}
        self.turns: dict[int, Any] = {}
        for i, step in enumerate(self.steps):
            held, results = self.apply(held, i, self.inputs.get(i))
            if step.op == "append":
                history.append(i, step.arguments["counts"])
                self.turns[i] = self.positions(i, history)
            elif step.op != "saved":
                getattr(history, step.op)(**step.arguments)
            self.check_contents(i, held, history, tokens)
            if results is not None:
                self.check_answers(i, results, history, tokens, gradients)
        if config.gradients:
            self.check_gradients(gradients)

    def check_contents(self, i: int, held: Any, history: History, tokens: list[Tokens]) -> None:
        now = contents(self.config, held)
        lengths = np.broadcast_to(np.asarray(held.length), (self.config.layers, len(history.rows)))
        if not (lengths == history.lengths).all():
            raise Mismatch(f"step {i}: lengths {lengths.tolist()}, not {history.lengths}")
        for layer, ((keys, values), known) in enumerate(zip(now, tokens)):
            for b, row in enumerate(history.rows):
                for e in row:
                    found = keys[b, e.place], values[b, e.place]
                    if e.name not in known.keys:
                        self.check_new(i, layer, e.name, found)
                        known.keys[e.name], known.values[e.name] = found
                    same = zip(found, (known.keys[e.name], known.values[e.name]))
                    if not all(np.array_equal(x, y) for x, y in same):
                        raise Mismatch(f"step {i}: layer {layer}, row {b}: {e} has changed")

    def check_new(self, i: int, layer: int, name: Any, found: Any) -> None:
        step, b, t = name
        _, keys, values = self.inputs[step]
        k, v = (wide(x[layer, b, t]) for x in (keys, values))
        given = self.steps[step].arguments
        if given.get("turned") and layer == given["layer"]:
            k = turned(k, self.turns[step][b][t], *given["turned"])
        near = [rounding(self.config, x) for x in (k, v)]
        if self.config.latent:
            k, near[0] = np.concatenate([v, k], -1), np.concatenate([near[1], near[0]], -1)
        for x, y, tolerance in zip(found, (k, v), near):
            # What is quantised is rounded to the dtype of the queries once more.
            exact = not tolerance.any() and not given.get("turned")
            slack = 0 if exact else 4 * abs(y).max() * float(jnp.finfo(self.config.dtype).eps)
            if not (abs(x - y) <= tolerance + slack).all():
                raise Mismatch(f"step {i}: layer {layer}, token {name} was stored as {x}, not {y}")

    def positions(self, i: int, history: History) -> list[Any]:
        """The positions of the queries of a step, as a tree moves them, for each row."""
        call = self.call(i, history)
        return [x if call.moved is None else call.moved(b, x) for b, x in enumerate(call.at_q)]

    def call(self, i: int, history: History) -> Call:
        given, metadata = self.steps[i].arguments, self.config.metadata
        t, counts = given["t"], np.asarray(given["counts"])
        first = np.asarray(history.lengths) - counts
        at_q = first[:, None] + np.arange(t)[None]
        at_k = lambda b, e: e.position
        if (moved := given.get("positions")) is not None:
            at_q = np.take_along_axis(moved, np.minimum(at_q, moved.shape[1] - 1), 1)
            at_k = lambda b, e: moved[b, e.place]
        aux = metadata["softmax_aux"]
        aux = None if aux is None else np.asarray(aux, float).reshape(len(aux), -1)
        scale = metadata["softmax_scale"] or self.config.query_dim**-0.5
        return Call(
            given["seen"], given["score"], scale, metadata["logits_soft_cap"], aux, at_q, at_k,
            given["moved"],
        )  # fmt: skip

    def check_answers(self, i, results, history, tokens, gradients) -> None:
        given, config = self.steps[i].arguments, self.config
        q = wide(self.inputs[i][0])
        if given["way"] == "top":
            self.check_top(i, results, history, tokens[given["layer"]], q)
            return
        out, lse = (None if x is None else wide(x) for x in results)
        layer = given["layer"]
        call = self.call(i, history)
        sums = 1.2e-7 if config.dtype != jnp.float64 else 2.3e-16
        narrow = float(jnp.finfo(config.dtype).eps)
        for b in range(len(history.rows)):
            n = given["counts"][b]
            wanted = np.where(np.arange(given["t"])[:, None, None] < n, self.wanted[i][b], 0)
            rows = q[b]
            if given.get("turned"):
                rows = np.stack(
                    [turned(x, at, *given["turned"]) for x, at in zip(rows, self.turns[i][b])]
                )
            answer = attend(history, tokens[layer], b, rows, call, wanted)
            most = max([abs(x).max() for x in tokens[layer].values.values()], default=0.0)
            error = most * (60 * sums * (2 + answer.most) + 3 * narrow)
            if not tokens[layer].values:
                answer.out = np.zeros_like(out[b])
            self.compare(i, b, "output", out[b, :n], answer.out[:n], error, answer)
            # What is quantised is read in float32, and here it was rounded to the queries' dtype.
            error = (60 * sums + 2 * narrow * (narrow > 1e-5)) * (2 + answer.most)
            if lse is not None:
                self.compare(i, b, "logsumexp", lse[b, :n], answer.lse[:n], error, answer)
            dq = answer.dq
            if given.get("turned"):
                dq = np.stack(
                    [
                        turned(x, at, *given["turned"], back=True)
                        for x, at in zip(dq, self.turns[i][b])
                    ]
                )
            gradients.setdefault(("q", i), {})[b] = dq
            for name, x in answer.learned.items():
                gradients[name] = gradients.get(name, 0) + x
            for kind, found in (("k", answer.dk), ("v", answer.dv)):
                for name, x in found.items():
                    have = gradients.setdefault((kind, layer), {})
                    have[name] = have.get(name, 0) + x

    def check_top(self, i, results, history, tokens, q) -> None:
        """The greatest logits, and that the keys named have these."""
        given, call = self.steps[i].arguments, self.call(i, history)
        values, indices = (np.asarray(x) for x in results)
        n = values.shape[-1]
        for b in range(len(history.rows)):
            answer = attend(history, tokens, b, q[b], call)
            narrow = float(jnp.finfo(self.config.dtype).eps)
            error = (1e-5 + 2 * narrow * (narrow > 1e-5)) * (2 + answer.most)
            for h, logits in enumerate(answer.logits):
                for t in range(given["counts"][b]):
                    best = np.concatenate([np.sort(logits[t])[::-1], np.full(n, -np.inf)])[:n]
                    self.compare(i, b, "top values", values[b, h, t], best, error)
                    have = dict(zip(answer.positions.tolist(), logits[t]))
                    named = [x for x in indices[b, h, t].tolist() if x >= 0]
                    there = [have.get(x, -np.inf) for x in named]
                    self.compare(i, b, "top keys", np.array(there), best[: len(named)], error)
                    if len(set(named)) < len(named) or len(named) != np.isfinite(best).sum():
                        raise Mismatch(f"step {i}: row {b}, head {h}, query {t} names {named}")

    def compare(self, i, b, what, got, want, error, answer: Answer | None = None) -> None:
        with np.errstate(invalid="ignore"):
            same = np.where(np.isinf(want), got == want, abs(got - want) <= error)
        if not same.all():
            at = tuple(np.argwhere(~same)[0])
            raise Mismatch(
                f"step {i} ({i != 'last' and self.steps[i].arguments.get('way')}), row {b}: {what} {at} is {got[at]}, "
                f"not {want[at]} (within {error:.2g}; {(~same).sum()} of {same.size})"
            )

    def check_gradients(self, expected: dict[Any, Any]) -> None:
        config = self.config

        def total(inputs, learned):
            held, found, self.learned = config.make(), 0.0, learned
            for i, step in enumerate(self.steps):
                mode = "jit" if step.op == "append" and step.arguments["mode"] == "donate" else None
                held, results = self.apply(held, i, inputs.get(i), mode)
                if results is not None and step.arguments["way"] != "top":
                    taken = (
                        np.arange(step.arguments["t"])
                        < np.asarray(step.arguments["counts"])[:, None]
                    )
                    g = self.wanted[i] * taken[..., None, None]
                    out = results[0]
                    # Outputs of what a row does not take mean nothing, and may be NaN times 0.
                    found += jnp.where(
                        jnp.asarray(taken)[..., None, None], out * jnp.asarray(g, out.dtype), 0
                    ).sum()
            return found

        names = ("softmax_scale", "logits_soft_cap", "softmax_aux")
        dtype = jnp.float64 if config.dtype == jnp.float64 else jnp.float32
        given = {n: config.metadata[n] for n in names if config.metadata[n] is not None}
        given = {n: jnp.asarray(x, dtype) for n, x in given.items()}
        self.tracing = True
        got, learned = jax.grad(total, (0, 1))(self.inputs, given)
        self.tracing, self.learned = False, {}
        sums = 1.2e-7 if config.dtype != jnp.float64 else 2.3e-16
        for name, x in learned.items():
            want = np.zeros(x.size) + np.ravel(expected.get(name, 0.0))
            size = 1 + max(abs(y).max() for y in (want, np.asarray(x)))
            have = np.asarray(x, float).ravel()
            self.compare("last", "all", f"gradient of {name}", have, want, 3000 * sums * size)
        for i, (dq, dk, dv) in got.items():
            shape = self.inputs[i][0].shape
            mine = expected.get(("q", i), {})
            want = np.stack([mine.get(b, np.zeros(shape[1:])) for b in range(shape[0])])
            size = 1 + max(abs(x).max(initial=0) for x in (want, np.asarray(dq)))
            self.compare(
                i, "all", "gradient of queries", np.asarray(dq, float), want, 3000 * sums * size
            )
            for kind, arrays in (("k", dk), ("v", dv)):
                for layer in range(config.layers):
                    self.check_tokens(
                        i, kind, layer, np.asarray(arrays[layer], float), expected, sums
                    )

    def check_tokens(self, i, kind, layer, got, expected, sums) -> None:
        config, found = self.config, expected.get((kind, layer), {})
        want = np.zeros_like(got)
        for (step, b, t), x in found.items():
            if step == i:
                given = self.steps[i].arguments
                if kind == "k" and given.get("turned") and layer == given["layer"]:
                    x = turned(x, self.turns[i][b][t], *given["turned"], back=True)
                if config.latent and kind == "k":
                    x = x[:, config.value_dim :]
                want[b, t] = x
        if config.latent and kind == "v":  # The latents are values, and the first of the keys.
            for (step, b, t), x in expected.get(("k", layer), {}).items():
                if step == i:
                    want[b, t] += x[:, : config.value_dim]
        size = 1 + abs(want).max(initial=0)
        self.compare(
            i, "all", f"gradient of {kind} of layer {layer}", got, want, 3000 * sums * size
        )


def case(seed: int, index: int, x64: bool = False, steps: int = 7) -> Runner:
    """The history of a number."""
    rng = np.random.default_rng([seed, index])
    config = Config.draw(rng, x64)
    return Runner(config, draw_steps(rng, config, steps), rng)


def describe(runner: Runner) -> str:
    lines = [repr(runner.config)]
    for i, step in enumerate(runner.steps):
        given = {k: v for k, v in step.arguments.items() if k not in ("seen", "score", "moved")}
        lines.append(f"  {i} {step.op} " + " ".join(f"{k}={v!r}" for k, v in given.items()))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run this one alone, and say what it does")
    parser.add_argument("--x64", action="store_true")
    parser.add_argument("--steps", type=int, default=7)
    args = parser.parse_args()
    from tqdm import tqdm

    jax.config.update("jax_enable_x64", args.x64)
    failed = 0
    for index in tqdm(range(args.cases) if args.case is None else [args.case]):
        again = f"python tests/nightly/fuzz/serve.py --seed {args.seed} --case {index}"
        again += " --x64" * args.x64 + f" --steps {args.steps}" * (args.steps != 7)
        try:
            runner = case(args.seed, index, args.x64, args.steps)
            if args.case is not None:
                print(describe(runner))
            runner.check()
        except Exception as error:
            failed += 1
            text = str(error).strip().splitlines() or [""]
            tqdm.write(f"{again}\n    {type(error).__name__}: {text[0][:400]}")
            if args.case is not None:
                raise
        if index % 20 == 19:
            jax.clear_caches()
    print(f"{failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
