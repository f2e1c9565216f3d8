"""Attention compiled by the compiler of TPUs, without a TPU.

    python tests/_tpu_compile.py v5e causal bias ...

prints one JSON object for each case: how many kernels there are and how many bytes are temporary,
or the error.
"""

import json
import os
import sys


TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "v7x": "tpu7x:2x2x1"}
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
    "tail": {"mask": "Causal()", "tokens": 333},
    "cap": {"mask": "Causal()", "cap": 30.0},
    "bias": {"mask": "Causal()", "bias": True},
    "alibi": {"mask": "Causal()", "score": "ALiBi(slopes)"},
    "t5": {"score": "T5Bias(table, bidirectional=True, max_distance=64)"},
    "dropout": {"mask": "Causal()", "dropout": 0.1},
    "sinks": {"mask": "Causal()", "sinks": True},
    "grouped": {"mask": "Causal()", "kv_heads": 1},
    "values": {"mask": "Causal()", "values": 64},
    "narrow": {"mask": "Causal()", "dim": 64, "values": 64},
    "wide": {"mask": "Causal()", "dim": 256, "values": 256},
    "float32": {"mask": "Causal()", "dtype": "float32"},
}


def compiled(chip: str, case: str):
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, SingleDeviceSharding

    import eqattn

    kinds = dict(mask="None", score=None, gradient=True, tokens=512, cap=None, bias=False)
    kinds |= dict(dropout=0.0, sinks=False, kv_heads=4, dim=128, values=128, dtype="bfloat16")
    spec = type("Spec", (), kinds | CASES[case])
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices
    place = SingleDeviceSharding(devices[0])
    dtype, t = jnp.dtype(spec.dtype), spec.tokens

    def array(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    inputs = {
        "ids": array(1, t, dtype=jnp.int32),
        "lengths": array(1, dtype=jnp.int32),
        "booleans": array(1, 1, t, t, dtype=jnp.bool_),
        "slopes": array(4, dtype=jnp.float32),
        "table": array(32, 4, dtype=jnp.float32),
    }
    wrt = {
        "query": array(1, t, 4, spec.dim),
        "key_": array(1, t, spec.kv_heads, spec.dim),
        "value": array(1, t, spec.kv_heads, spec.values),
    }
    if spec.bias:
        wrt["bias"] = array(1, 4, t, t, dtype=jnp.float32)
    if spec.sinks:
        wrt["sinks"] = array(4, dtype=jnp.float32)

    def call(wrt, inputs):
        metadata = eqattn.AttentionMetadata(
            runtime_dtype=dtype,
            platform="tpu",
            blocksize_q=128 * spec.kv_heads // 4 if spec.kv_heads < 4 else 128,
            blocksize_k=128,
            logits_soft_cap=spec.cap,
            dropout_prob=spec.dropout,
            softmax_aux=wrt.get("sinks"),
        )
        names = {**vars(eqattn), **inputs}
        return eqattn.attention(
            wrt["query"],
            wrt["key_"],
            wrt["value"],
            eqattn.Blockwise(metadata),
            mask=eval(spec.mask, names),
            score=None if spec.score is None else eval(spec.score, names),
            bias=wrt.get("bias"),
            key=jax.random.key(0) if spec.dropout else None,
        ).attention_outputs

    def gradient(wrt, inputs, cotangent):
        out, transpose = jax.vjp(lambda wrt: call(wrt, inputs), wrt)
        return out, transpose(cotangent)

    mesh = Mesh(np.array(devices[:1]), ("x",)).abstract_mesh
    with jax.sharding.use_abstract_mesh(mesh):
        if spec.gradient:
            args = (wrt, inputs, array(1, t, 4, spec.values))
            lowered = jax.jit(gradient).lower(*args)
        else:
            lowered = jax.jit(call).lower(wrt, inputs)
    return lowered


def report(chip: str, case: str) -> dict:
    try:
        lowered = compiled(chip, case)
        program = lowered.compile()
    except Exception as e:  # what the compiler says is the result
        return {"error": f"{type(e).__name__}: {e}"[:600]}
    kernels = lowered.as_text().count("tpu_custom_call")
    return {"kernels": kernels, "temporary": program.memory_analysis().temp_size_in_bytes}


if __name__ == "__main__":
    # Nothing may ask for a TPU's host, and other processes may load the compiler meanwhile.
    os.environ |= {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "JAX_PLATFORMS": "cpu",
    }
    chip, *cases = sys.argv[1:]
    for case in cases or CASES:
        print(json.dumps({"chip": chip, "case": case, **report(chip, case)}), flush=True)
