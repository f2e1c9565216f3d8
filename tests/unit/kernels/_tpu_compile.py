"""Attention compiled by the compiler of TPUs, without a TPU.

    python tests/unit/kernels/_tpu_compile.py v5e causal bias ...

prints one JSON object for each case: how many kernels and collectives there are, how many bytes the
largest copy has and how many are temporary; or the error.
"""

import json
import math
import os
import pathlib
import re
import subprocess
import sys

from _predicates import any_odd, MASKS
from _tpu_schedule import Schedule


APART = "ScoreFn(lambda s, b, h, q, k: s + table[abs(q - k) % 32, h])"
# Each with what differs from the plain call.
CASES: dict[str, dict] = {
    "plain": {},
    "causal": {"mask": "Causal()"},
    "forward": {"mask": "Causal()", "gradient": False},
    "window": {"mask": "Causal() & SlidingWindow(100, 0)"},
    "sinks of a window": {"mask": "Causal() & SlidingWindow(100, 0, sinks=4)"},
    "prefix": {"mask": "PrefixLM(33)"},
    "chunked": {"mask": "ChunkedCausal(96)"},
    "not": {"mask": "~Causal()"},
    "segments": {"mask": "Segments(ids)"},
    "lengths": {"mask": "KeyPadding(lengths)"},
    "booleans": {"mask": "DenseMask(booleans)"},
    "booleans, grouped": {"mask": "DenseMask(booleans)", "kv_heads": 2},
    "booleans, tail": {"mask": "Causal() & DenseMask(booleans)", "tokens": 333},
    "bias, tail": {"mask": "Causal()", "bias": "bfloat16", "tokens": 333, "kv_heads": 2},
    "tail": {"mask": "Causal()", "tokens": 333},
    "one query": {"mask": "KeyPadding(lengths)", "queries": 1},
    "one query, float32": {"queries": 1, "dtype": "float32"},
    "one query, float16": {"queries": 1, "dtype": "float16", "platform": "auto"},
    "listed": {"mask": "Selected(listed)"},
    "listed, float32": {"mask": "Selected(listed)", "dtype": "float32"},
    "listed blocks": {"mask": "Causal() & Selected(listed_blocks, 128, 128)"},
    "listed blocks, grouped": {"mask": "Selected(listed_blocks, 128, 128)", "kv_heads": 2},
    "cap": {"mask": "Causal()", "cap": 30.0},
    "bias": {"mask": "Causal()", "bias": "float32"},
    "bias, bfloat16": {"bias": "bfloat16", "kv_heads": 2, "rows": 2},
    "bias, float32": {"mask": "Causal()", "bias": "float32", "dtype": "float32"},
    "bias, one block": {"bias": "bfloat16", "sides": (512, 512)},
    # Too large for the compiler to copy it to vector memory ahead of a kernel.
    "bias, long": {"mask": "Causal()", "bias": "bfloat16", "tokens": 4096, "sides": (512, 512)},
    "bias, fewer lanes": {"mask": "Causal()", "bias": "float32", "tokens": 384, "sides": (96, 64)},
    "alibi": {"mask": "Causal()", "score": "ALiBi(slopes)"},
    "t5": {"mask": "Causal()", "score": "T5Bias(table, max_distance=64)"},
    "t5, grouped": {"score": "T5Bias(table, max_distance=64)", "kv_heads": 1, "tokens": 333},
    "t5, one block": {
        "score": "T5Bias(table, max_distance=64)",
        "tokens": 333,
        "sides": (333, 333),
    },
    "differences": {"mask": "MaskFn(lambda b, h, q, k: starts[abs(q - k)] > 0)", "score": APART},
    "differences, float32": {"mask": "Causal()", "score": APART, "dtype": "float32"},
    # Reads a table by query and key, and not by their difference, and so runs XLA.
    "both": {
        "score": "ScoreFn(lambda s, b, h, q, k: s + slopes[(q * k) % 4])",
        "platform": "auto",
    },
    "functions of floats": {"mask": "Causal()", "score": "ScoreFn(of_floats)"},
    "functions of integers": {"mask": "Causal()", "score": "ScoreFn(of_integers)"},
    "functions of predicates": {"mask": "MaskFn(any_odd)", "score": "ScoreFn(of_predicates)"},
    "narrow numbers": {"mask": "MaskFn(of_narrow)"},
    "keys under a score": {"mask": "KeyPadding(lengths)", "score": "ScoreFn(capped)"},
    "lookups": {"mask": "MaskFn(lambda b, h, q, k: starts[q] <= k)", "score": "ScoreFn(looked_up)"},
    "dropout": {"mask": "Causal()", "dropout": 0.1},
    "sinks": {"mask": "Causal()", "sinks": True},
    "grouped": {"mask": "Causal()", "kv_heads": 1},
    "values": {"mask": "Causal()", "values": 64},
    "narrow": {"mask": "Causal()", "dim": 64, "values": 64},
    "wide": {"mask": "Causal()", "dim": 256, "values": 256},
    "float32": {"mask": "Causal()", "dtype": "float32"},
    "tangent": {"mask": "Causal()", "tangent": True},
    "tangent float32": {"mask": "Causal()", "dtype": "float32", "tangent": True, "dropout": 0.1},
    "tangent of t5": {
        "mask": "Causal()",
        "score": "T5Bias(table, max_distance=64)",
        "kv_heads": 2,
        "tangent": True,
    },
    "tangent of a bias": {
        "bias": "float32",
        "sinks": True,
        "kv_heads": 1,
        "values": 64,
        "tangent": True,
    },
}
CASES |= {f"mask {n}": {"mask": f"MaskFn(MASKS[{n!r}])", "gradient": False} for n in MASKS}
OF_ROWS = {"strategy": "Ragged", "mask": "Causal() & KeyPadding(lengths)"}
ROWS = {**OF_ROWS, "mask": "KeyPadding(lengths)", "gradient": False, "in_place": True}
SHARED = {**ROWS, "queries": 1, "tokens": 65_536}  # by devices: rows and heads
LONG = {**ROWS, "queries": 1, "tokens": 65_536, "heads": 8, "rows": 8}
PROMPTS = {**ROWS, "queries": 512, "tokens": 8192, "heads": 32, "kv_heads": 8}
LATENT = {**ROWS, "queries": 1, "kv_heads": 1, "heads": 16, "dim": 576, "values": 512}
LATENT |= {"tokens": 8192, "latent": True}
CASES |= {
    "decode": {**ROWS, "queries": 1, "kv_heads": 2, "sinks": True, "cap": 30.0},
    "decode, one key head": {**ROWS, "queries": 1, "kv_heads": 1},
    "drafts": {**ROWS, "queries": 5, "mask": "Causal() & KeyPadding(lengths)"},
    "int8": {**ROWS, "queries": 1, "kv_heads": 2, "stored": "int8"},
    "float8": {**ROWS, "queries": 1, "kv_heads": 2, "stored": "float8_e4m3fn"},
    "pages": {**ROWS, "queries": 1, "kv_heads": 2, "page": 64},
    "int8 pages": {**ROWS, "queries": 1, "kv_heads": 2, "page": 64, "stored": "int8"},
    "prompts": {**ROWS, "mask": "Causal() & KeyPadding(lengths)", "kv_heads": 2},
    "rows": {**OF_ROWS, "kv_heads": 2},
    "rows, mesh": {**OF_ROWS, "mesh": (2, 2)},
    "prompts, booleans": {**ROWS, "mask": "DenseMask(booleans)"},
    "prompts, booleans, grouped": {**ROWS, "mask": "DenseMask(booleans)", "kv_heads": 2},
    "decode float32": {**ROWS, "queries": 1, "kv_heads": 2, "dtype": "float32"},
    "decode, mesh": {**SHARED, "mesh": (2, 2), "sinks": True},
    "prompts, mesh": {**ROWS, "mask": "Causal() & KeyPadding(lengths)", "mesh": (2, 2)},
    "int8, mesh": {**SHARED, "stored": "int8", "mesh": (2, 2), "heads": 8, "kv_heads": 8},
    "pages, mesh": {**SHARED, "page": 64, "mesh": (2, 2)},
    "int8 pages, mesh": {**SHARED, "page": 64, "stored": "int8", "mesh": (1, 4)},
    "long rows": {**LONG, "kv_heads": 8},
    "long int8": {**LONG, "kv_heads": 8, "stored": "int8"},
    "long pages": {**LONG, "kv_heads": 8, "page": 64},
    "long int8 pages": {**LONG, "kv_heads": 8, "page": 64, "stored": "int8"},
    "prompts, heads": {**PROMPTS},
    "prompts, heads, pages": {**PROMPTS, "page": 64},
    "prompts, heads, int8 pages": {**PROMPTS, "page": 64, "stored": "int8"},
    "prompts, heads, wide": {**PROMPTS, "dim": 256, "values": 256},
    "prompts, heads, float32": {**PROMPTS, "dtype": "float32"},
    "prompts, heads, uneven": {**PROMPTS, "tokens": 8200},
    "int8 prompts": {**ROWS, "kv_heads": 2, "stored": "int8"},
    "int8 dropout": {**ROWS, "kv_heads": 2, "stored": "int8", "queries": 1, "dropout": 0.1},
    "latents": {**LATENT},
    "latent pages": {**LATENT, "page": 64},
    "int8 latents": {**LATENT, "stored": "int8"},
    "prompts, pages, one key head": {
        **ROWS,
        "queries": 128,
        "kv_heads": 1,
        "heads": 16,
        "tokens": 8192,
        "page": 64,
    },
    "latent prompts": {**LATENT, "queries": 128},
    "latent prompts, pages": {**LATENT, "queries": 128, "page": 64},
    "int8 latent prompts, pages": {**LATENT, "queries": 128, "page": 64, "stored": "int8"},
    "prompts, pages, wide": {
        **ROWS,
        "queries": 64,
        "kv_heads": 8,
        "heads": 16,
        "dim": 256,
        "values": 256,
        "tokens": 2048,
        "page": 64,
    },
    "long, wide": {"mask": "Causal()", "tokens": 8192, "dim": 256, "values": 256},
    "long window": {
        "mask": "Causal() & SlidingWindow(1000, 0)",
        "tokens": 2**20,
        "gradient": False,
        "heads": 1,
        "kv_heads": 1,
    },
    "long": {"mask": "Causal()", "tokens": 131_072, "gradient": False},
    "long gradient": {"mask": "Causal()", "tokens": 131_072},
    "long tangent": {"mask": "Causal()", "tokens": 16_384, "tangent": True},
}


def functions(inputs: dict) -> dict:
    """Functions of users that have every operation that kernels take, of pairs, rows and keys."""
    import jax.numpy as jnp
    from jax import lax

    one = [lax.abs, lax.ceil, lax.cos, lax.erf, lax.exp, lax.exp2, lax.floor, lax.log, lax.log1p]
    one += [lax.logistic, lax.neg, lax.round, lax.rsqrt, lax.sign, lax.sin, lax.sqrt, lax.square]
    one += [lax.tanh, lambda x: lax.integer_pow(x, 3), lambda x: lax.clamp(0.5, x, 2.0)]
    one += [lambda x: jnp.where(lax.is_finite(x), x, 0.0)]
    two = [lax.add, lax.div, lax.max, lax.min, lax.mul, lax.pow, lax.rem, lax.sub]
    compare = [lax.eq, lax.ge, lax.gt, lax.le, lax.lt, lax.ne]

    def of_floats(s, b, h, q, k):
        x = lax.abs(s) + 1.0
        row, key = (1.0 + 0.01 * i.astype(jnp.float32) for i in (q, k))
        terms = [f(y) for f in one for y in (x, row, key, 1.0 + h.astype(jnp.float32))]
        terms += [f(*y) for f in two for y in ((x, row), (key, x), (row, key), (row, row))]
        terms += [jnp.where(f(x, row), x, key) for f in compare]
        return s + 0.01 * sum(terms)

    def of_integers(s, b, h, q, k):
        i, n = q - k, jnp.int32(3)
        two = [lax.add, lax.max, lax.min, lax.mul, lax.sub, jnp.floor_divide, jnp.remainder]
        two += [lax.div, lax.rem, lax.shift_left, lax.shift_right_arithmetic]
        two += [lax.shift_right_logical, lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor]
        terms = [f(y, n) for f in two for y in (i, q, k, h)] + [f(q, k + 1) for f in two[:7]]
        terms += [f(y) for f in (lax.abs, lax.neg, lax.sign, lax.bitwise_not) for y in (i, q)]
        seen = [f(q, k) for f in compare] + [f(i, n) for f in compare]
        odd = (seen[0] & seen[1] | ~seen[2]) ^ seen[3]
        total = sum(terms) + sum(x.astype(jnp.int32) for x in (*seen, odd))
        return s + 1e-3 * jnp.where(odd, total, -total).astype(jnp.float32)

    def of_predicates(s, b, h, q, k):
        s = jnp.where(any_odd(b, h, q, k), s, s - 1.0)
        return lax.cond(q > k, lambda: lax.stop_gradient(s), lambda: 0.5 * s)

    def capped(s, b, h, q, k):
        return 2.0 * jnp.tanh(0.5 * s)

    def of_narrow(b, h, q, k):
        seen = q >= k
        for name in ("int8", "uint8", "int16", "uint16", "uint32"):
            x, y = q.astype(name), (q - k).astype(name)
            seen ^= (x == y) | (x > k.astype(name)) ^ (~x & y | x ^ y < 3)
        near = (q - k).astype(jnp.bfloat16) < 9
        return seen ^ near ^ (q.astype(jnp.uint32) * 40503 % 7 > 2)

    def looked_up(s, b, h, q, k):
        slope, near = inputs["slopes"][h], inputs["starts"][q] == inputs["starts"][k]
        root = lambda x: jnp.sqrt(inputs["slopes"][x % 4])  # is taken in the kernel
        s = s * root(q) + jnp.log(slope) * root(k)
        return jnp.where(near, s, s - slope * (q - k).astype(s.dtype))

    names = dict(of_floats=of_floats, of_integers=of_integers, looked_up=looked_up)
    names |= dict(of_predicates=of_predicates, of_narrow=of_narrow, any_odd=any_odd)
    return names | dict(capped=capped)


def compiled(chip: str, case: str):  # noqa: C901 (a switch over kinds)
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
    from measure.tpu_report.chips import CHIPS

    import eqattn
    from eqattn._problem.storage import as_stored
    from eqattn.cache import LatentKV, Pages, Quantized

    kinds = dict(mask="None", score=None, gradient=True, tokens=512, cap=None, bias=None)
    kinds |= dict(platform="pallas", strategy="Blockwise", queries=None, stored=None, page=None)
    kinds |= dict(tangent=False)  # whether forward mode is compiled, in place of gradients
    kinds |= dict(sides=None)  # of blocks
    kinds |= dict(in_place=False)  # whether keys are no arrays, which many queries copy
    kinds |= dict(latent=False)  # whether the values are the first features of the keys
    kinds |= dict(mesh=(1, 1), heads=4)  # over how many devices rows and heads are sharded
    kinds |= dict(dropout=0.0, sinks=False, kv_heads=4, dim=128, values=128, dtype="bfloat16")
    spec = type("Spec", (), kinds | CASES[case])
    name = CHIPS[chip].topology
    devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    rows, auto = CASES[case].get("rows", spec.mesh[0]), (AxisType.Auto,) * 2
    grid = np.array(devices[: spec.mesh[0] * spec.mesh[1]]).reshape(spec.mesh)
    mesh = Mesh(grid, ("dp", "tp"), axis_types=auto)
    dtype, s = jnp.dtype(spec.dtype), spec.tokens
    t = s if spec.queries is None else spec.queries

    def array(*shape, dtype=dtype, over=()):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*over)))

    inputs = {
        "ids": array(1, min(t, 512), dtype=jnp.int32),
        "lengths": array(rows, dtype=jnp.int32, over=("dp",)),
        "booleans": array(1, 1, min(t, 512), min(s, 512), dtype=jnp.bool_),
        "listed": array(1, 1, t, 64, dtype=jnp.int32),
        "listed_blocks": array(1, spec.kv_heads, -(-t // 128), 2, dtype=jnp.int32),
        "slopes": array(4, dtype=jnp.float32),
        "starts": array(512, dtype=jnp.int32),
        "table": array(32, 4, dtype=jnp.float32),
    }
    wrt = {
        "query": array(rows, t, spec.heads, spec.dim, over=("dp", None, "tp")),
    }
    rest = spec.dim - spec.values if spec.latent else spec.dim
    for name, dim in (("key_", rest), ("value", spec.values)):
        lead = (rows, s) if spec.page is None else (rows * s // spec.page, spec.page)
        over = (None if spec.page else "dp", None, "tp")
        wrt[name] = array(*lead, spec.kv_heads, dim, dtype=spec.stored or dtype, over=over)
    if spec.stored:
        shares = spec.mesh[1]
        scales = (lead[0], shares, lead[1] * spec.kv_heads // shares)
        inputs["scales"] = array(*scales, dtype=jnp.float32, over=(over[0], "tp"))
    if spec.page:
        inputs["table"] = array(rows, s // spec.page, dtype=jnp.int32, over=("dp",))

    def kept(x, inputs):
        x = Quantized(x, inputs["scales"], dtype) if spec.stored else x
        x = Pages(x, inputs["table"]) if spec.page else x
        return as_stored(x) if spec.in_place else x

    if spec.bias:
        wrt["bias"] = array(1, 4, t, t, dtype=jnp.dtype(spec.bias))
    if spec.sinks:
        wrt["sinks"] = array(4, dtype=jnp.float32)

    if spec.score is not None and "table" in spec.score:
        wrt["table"] = inputs.pop("table")

    sides = spec.sides or (128 * spec.kv_heads // 4, 128)
    blocks = dict(zip(("blocksize_q", "blocksize_k"), sides))
    automatic = spec.strategy == "Ragged" or s > 4096

    def call(wrt, inputs):
        metadata = eqattn.AttentionMetadata(
            runtime_dtype=dtype,
            platform=spec.platform,
            backend="tpu",
            **({} if automatic else blocks),
            logits_soft_cap=spec.cap,
            dropout_prob=spec.dropout,
            softmax_aux=wrt.get("sinks"),
        )
        public = {name: getattr(eqattn, name) for name in eqattn.__all__}
        names = {**public, **inputs, **wrt, **functions(inputs), "MASKS": MASKS}
        key, value = kept(wrt["key_"], inputs), kept(wrt["value"], inputs)
        if spec.latent and spec.page:
            key = Pages(LatentKV(value.content, key.content), inputs["table"])
        elif spec.latent:
            key = LatentKV(value, key)
        return eqattn.attention(
            wrt["query"],
            key,
            key.c_kv if spec.latent else value,
            getattr(eqattn, spec.strategy)(metadata),
            mask=eval(spec.mask, names),
            score=None if spec.score is None else eval(spec.score, names),
            bias=wrt.get("bias"),
            key=jax.random.key(0) if spec.dropout else None,
        ).attention_outputs

    def gradient(wrt, inputs, cotangent):
        out, transpose = jax.vjp(lambda wrt: call(wrt, inputs), wrt)
        return out, transpose(cotangent)

    def tangent(wrt, inputs, moved):
        return jax.jvp(lambda wrt: call(wrt, inputs), (wrt,), (moved,))

    with jax.set_mesh(mesh):
        if spec.tangent:
            lowered = jax.jit(tangent).lower(wrt, inputs, wrt)
        elif spec.gradient:
            args = (wrt, inputs, array(rows, t, spec.heads, spec.values, over=("dp", None, "tp")))
            lowered = jax.jit(gradient).lower(*args)
        else:
            lowered = jax.jit(call).lower(wrt, inputs)
    return lowered


MAKES = ("copy", "copy-start", "transpose", "pad", "concatenate", "gather", "convert", "fusion")


def nbytes(type: str) -> int:
    """Of the largest array in the type of a result."""
    sizes = [
        math.prod(map(int, filter(None, shape.split(",")))) * int(bits) // 8
        for bits, shape in re.findall(r"[a-z]+(\d+)[a-z\d]*\[([\d,]*)\]", type)
    ]
    return max(sizes, default=0)


def report(chip: str, case: str) -> dict:
    try:
        lowered = compiled(chip, case)
        program = lowered.compile()
    except Exception as e:  # what the compiler says is the result
        return {"error": f"{type(e).__name__}: {e}"[:600]}
    memory = program.memory_analysis()
    return {
        "kernels": lowered.as_text().count("tpu_custom_call"),
        "temporary": memory.temp_size_in_bytes,
        "arguments": memory.argument_size_in_bytes,
        **moved(program),
    }


def moved(program) -> dict:
    """How many collectives there are, and the bytes of the largest copy."""
    try:
        schedule = Schedule(program.as_text())
    except RuntimeError:  # this compiler cannot print some of its programs
        return {}
    collectives = [*schedule.exchanges, *schedule.other_collectives, *schedule.moves]
    made = [i for body in schedule.computations.values() for i in body if i.opcode in MAKES]
    copied = max((nbytes(i.type) for i in made), default=0)
    return {"collectives": len(collectives), "copied": copied}


def expected(case: str) -> int:
    """How many kernels there are at least: of the output, and of the gradients."""
    given = CASES[case]
    return 0 if "platform" in given else 1 if not given.get("gradient", True) else 2


def compile_all(chip: str, cases: tuple[str, ...]) -> dict:
    """The reports of cases (of all, if none is given), from a process of its own."""
    import pytest

    pytest.importorskip("libtpu", reason="libtpu, which compiles for TPUs, is not installed")
    script = pathlib.Path(__file__)
    env = {**os.environ, "PYTHONPATH": str(script.parents[3])}
    env.pop("XLA_FLAGS", None)
    out = subprocess.run(
        [sys.executable, str(script), chip, *cases], env=env, capture_output=True, text=True
    )
    assert out.returncode == 0, out.stderr[-2000:]
    return {r["case"]: r for r in map(json.loads, out.stdout.splitlines())}


if __name__ == "__main__":
    # Nothing may ask for a TPU's host, and other processes may load the compiler meanwhile.
    os.environ |= {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "JAX_PLATFORMS": "cpu",
    }
    sys.path.append(str(pathlib.Path(__file__).parents[2]))
    chip, *cases = sys.argv[1:]
    for case in cases or CASES:
        print(json.dumps({"chip": chip, "case": case, **report(chip, case)}), flush=True)
