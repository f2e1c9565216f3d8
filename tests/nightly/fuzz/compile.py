"""Random calls compiled by the compiler of TPUs, without a TPU: what `platform="auto"` runs there.

    python tests/nightly/fuzz/compile.py --chip v6e --seed 0 --cases 50

Each case is printed before it is compiled, and again with what went wrong: the compiler may end the
process. Values are judged elsewhere; here a call only has to compile.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np


MASKS = (
    "none causal window sinks segments lengths prefix blocks chunks booleans not function listed "
    "listed|window listed-blocks tree"
).split()
SCORES = "none none alibi cap bias function t5 sinks dropout scale".split()
TRANSFORMS = "forward gradient gradient logsumexp carry jvp mapped largest second".split()
CACHES = "dense paged int8 float8 paged-int8 ring latents paged-latents int8-latents".split()


def scored(name: str, heads: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What of a score is metadata, and what the call is given."""
    import jax
    import jax.numpy as jnp

    import eqattn as e

    far = lambda x, b, h, q, k: x - jnp.abs(q - k).astype(x.dtype)
    fields = {
        "cap": lambda: dict(logits_soft_cap=20.0),
        "scale": lambda: dict(softmax_scale=jnp.float32(0.3)),
        "sinks": lambda: dict(softmax_aux=jnp.zeros(heads)),
        "dropout": lambda: dict(dropout_prob=0.1),
    }
    given = {
        "alibi": lambda: dict(score=e.ALiBi(jnp.ones(heads))),
        "function": lambda: dict(score=e.ScoreFn(far)),
        "t5": lambda: dict(score=e.T5Bias(jnp.ones((32, heads)))),
        "dropout": lambda: dict(key=jax.random.key(0)),
    }
    return fields.get(name, dict)(), given.get(name, dict)()


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of attention over arrays."""

    t: int
    s: int
    heads: tuple[int, int]
    dims: tuple[int, int]
    batch: int
    dtype: str
    mask: str
    score: str
    transform: str
    strategy: str

    @classmethod
    def draw(cls, rng: np.random.Generator) -> "Call":
        one = lambda *xs: xs[rng.integers(len(xs))]
        t = one(1, 2, 3, 8, 17, 64, 130)
        return cls(
            t=t,
            s=one(1, 2, 5, 16, 64, 130, 300, t, t),
            heads=one((1, 1), (2, 2), (4, 2), (4, 1), (3, 1), (5, 5)),
            dims=one((8, 8), (16, 16), (128, 128), (64, 128), (192, 128), (3, 5), (256, 256)),
            batch=one(1, 1, 2),
            dtype=one("bfloat16", "bfloat16", "float32"),
            mask=one(*MASKS),
            score=one(*SCORES),
            transform=one(*TRANSFORMS),
            strategy=one("Blockwise", "Blockwise", "Ragged"),
        )

    def visible(self) -> Any:
        import jax.numpy as jnp

        import eqattn as e

        t, s, b = self.t, self.s, self.batch
        half = jnp.full((b,), s // 2 + 1, jnp.int32)
        ids = lambda n: jnp.zeros((b, n), jnp.int32)
        listed = e.Selected(jnp.zeros((1, 1, t, 2), jnp.int32))
        return {
            "none": lambda: None,
            "causal": lambda: e.Causal(),
            "window": lambda: e.Causal() & e.SlidingWindow(5, 0),
            "sinks": lambda: e.Causal() & e.SlidingWindow(5, 0, sinks=2),
            "segments": lambda: e.Segments(ids(t), ids(s)),
            "lengths": lambda: e.KeyPadding(half),
            "prefix": lambda: e.PrefixLM(half),
            "blocks": lambda: e.BlockCausal(3),
            "chunks": lambda: e.ChunkedCausal(5),
            "booleans": lambda: e.DenseMask(jnp.ones((t, s), bool)),
            "not": lambda: ~e.SlidingWindow(3, 3) | e.KeyPadding(half),
            "function": lambda: e.MaskFn(lambda b, h, q, k: (q * 7 + k * 3) % 5 < 3),
            "listed": lambda: listed,
            "listed|window": lambda: listed | e.SlidingWindow(3, 0),
            "listed-blocks": lambda: e.Selected(jnp.zeros((1, 1, -(-t // 2), 1), jnp.int32), 2, 2),
            "tree": lambda: e.Tree(np.arange(-1, t - 1)) if t <= s else None,
        }[self.mask]()

    def build(self, array: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        import jax
        import jax.numpy as jnp

        import eqattn as e

        (h, k), (d, v), lead = self.heads, self.dims, (self.batch,)
        dtype, (fields, given) = jnp.dtype(self.dtype), scored(self.score, h)
        if self.score == "bias":
            given["bias"] = jnp.zeros((h, self.t, self.s), dtype)
        strategy = getattr(e, self.strategy)(e.AttentionMetadata(backend="tpu", **fields))
        mask = self.visible()
        also = {
            "logsumexp": dict(return_logsumexp=True),
            "carry": dict(return_carry=True),
            "largest": dict(return_max_logits=True),
        }.get(self.transform, {})

        def call(*qkv):
            out = e.attention(*qkv, strategy, mask=mask, **given, **also)
            found = out.attention_outputs, out.logsumexp, out.carry, out.max_logits
            return found if also else out.attention_outputs

        gradient = jax.grad(lambda *qkv: call(*qkv).astype(jnp.float32).sum(), (0, 1, 2))
        if self.transform == "mapped":
            lead = (2, *lead)
        program = {
            "gradient": gradient,
            "jvp": lambda *x: jax.jvp(call, x, x),
            "second": lambda *x: jax.jvp(gradient, x, x),
            "mapped": jax.vmap(call),
        }.get(self.transform, call)
        sizes = (self.t, h, d), (self.s, k, d), (self.s, k, v)
        return program, tuple(array((*lead, *x), dtype) for x in sizes)


@dataclasses.dataclass(frozen=True)
class Step:
    """A step over a cache."""

    kind: str
    batch: int
    tokens: int
    capacity: int
    page: int
    heads: tuple[int, int]
    dim: int
    dtype: str
    window: bool
    score: str

    @classmethod
    def draw(cls, rng: np.random.Generator) -> "Step":
        one = lambda *xs: xs[rng.integers(len(xs))]
        return cls(
            kind=one(*CACHES),
            batch=one(1, 3),
            tokens=one(1, 1, 2, 4, 17, 64),
            capacity=one(128, 256, 1024, 2048),
            page=one(8, 16, 64),
            heads=one((8, 2), (4, 4), (8, 8), (8, 1), (6, 2)),
            dim=one(64, 128, 256),
            dtype=one("bfloat16", "bfloat16", "float32"),
            window=one(False, True),
            score=one("none", "none", "cap", "alibi", "sinks"),
        )

    def cache(self) -> Any:
        import jax.numpy as jnp

        from eqattn import cache as c

        latent = "latents" in self.kind
        dims = (1, 64, 512) if latent else (self.heads[1], self.dim, self.dim)
        sizes = dict(zip(("kv_heads", "head_dim", "value_dim"), dims), dtype=jnp.dtype(self.dtype))
        shape = self.batch, self.capacity
        if "paged" in self.kind:
            stored = dict(stored=jnp.int8) if "int8" in self.kind else dict(bits=False)
            pages = self.batch * self.capacity // self.page
            made = c.PagedKVCache.empty(*shape, pages, self.page, **sizes, **stored)
            made = made.reserve(self.capacity)
        elif "int8" in self.kind:
            made = c.QuantizedKVCache.empty(*shape, **sizes)
        elif self.kind == "float8":
            made = c.QuantizedKVCache.empty(*shape, **sizes, stored=jnp.float8_e4m3fn)
        else:
            make = c.RingBufferCache if self.kind == "ring" else c.KVCache
            made = make.empty(*shape, **sizes, bits=False)
        return c.LatentKVCache(made) if latent else made

    def build(self, array: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        import jax
        import jax.numpy as jnp

        import eqattn as e

        latent = "latents" in self.kind
        h, k = (self.heads[0], 1) if latent else self.heads
        fields, given = scored(self.score, h)
        strategy = e.Ragged(e.AttentionMetadata(backend="tpu", **fields))

        def step(cache, query, key_, value):
            offset, cache = cache.length, cache.append(key_, value)
            mask = e.Causal() & cache.mask()
            mask = mask & e.SlidingWindow(60, 0) if self.window else mask
            values = cache.key.c_kv if latent else cache.value
            places = dict(q_offset=offset, kv_positions=cache.positions)
            out = e.attention(query, cache.key, values, strategy, mask=mask, **given, **places)
            return cache, out.attention_outputs

        dims = (576, 64, 512) if latent else (self.dim,) * 3
        new = [array((self.batch, self.tokens, n, d), jnp.dtype(self.dtype))
               for n, d in zip((h, k, k), dims)]  # fmt: skip
        cache = jax.tree.map(lambda x: array(x.shape, x.dtype), self.cache())
        return step, (cache, *new)


def drawn(seed: int, i: int) -> Call | Step:
    rng = np.random.default_rng([seed, i])
    return (Call if rng.random() < 0.6 else Step).draw(rng)


def failures(chip: str, seed: int, cases: range) -> list[str]:
    """What went wrong in these cases, in a process of its own; a new one after each abort."""
    found, left = [], cases
    env = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[3])}
    env.pop("XLA_FLAGS", None)
    while len(left):
        command = [sys.executable, __file__, "--chip", chip, "--seed", str(seed)]
        command += ["--first", str(left.start), "--cases", str(len(left))]
        run = subprocess.run(command, env=env, capture_output=True, text=True)
        lines = [json.loads(x) for x in run.stdout.splitlines()]
        found += [f"{x['case']}: {x['error']}" for x in lines if "error" in x]
        if run.returncode == 0:
            break
        assert lines, run.stderr[-2000:]
        found.append(f"{lines[-1]['case']}: the process ended, {run.stderr[-300:]}")
        left = range(lines[-1]["index"] + 1, left.stop)
    return found


def main() -> None:
    # Nothing may ask for a TPU's host, and other processes may load the compiler meanwhile.
    os.environ |= {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
    }
    from measure.tpu_report.chips import CHIPS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chip", choices=CHIPS, default="v6e")
    for name, default in (("seed", 0), ("first", 0), ("cases", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    import jax
    from jax.experimental import topologies
    from jax.sharding import Mesh, SingleDeviceSharding

    topology = CHIPS[args.chip].topology
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    place = SingleDeviceSharding(device)
    array = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    for i in range(args.first, args.first + args.cases):
        case = drawn(args.seed, i)
        about = dict(index=i, case=repr(case))
        print(json.dumps(about), flush=True)
        try:
            with jax.sharding.use_abstract_mesh(Mesh([device], ("x",)).abstract_mesh):
                program, shapes = case.build(array)
                jax.jit(program).lower(*shapes).compile()
        except Exception as e:  # what the compiler says is the result
            print(json.dumps(about | dict(error=f"{type(e).__name__}: {e}"[:400])), flush=True)


if __name__ == "__main__":
    sys.path.append(str(pathlib.Path(__file__).parents[2]))
    main()
