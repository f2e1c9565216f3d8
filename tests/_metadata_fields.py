"""Hypothesis strategies for arrays of any bits and for the fields of `AttentionMetadata`."""

import numpy as np
from hypothesis import strategies as st
from jax.sharding import AbstractMesh

from eqattn._config.platform import Backend, Platform


FLOATS = ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"]


@st.composite
def arrays(draw, shapes=((), (3,), (2, 2), (0,), (1, 0, 2)), dtypes=tuple(FLOATS[:3])):
    dtype = np.dtype(draw(st.sampled_from(dtypes)))
    shape = draw(st.sampled_from(shapes))
    size = int(np.prod(shape)) * dtype.itemsize
    # Any bit pattern at all: NaN payloads, subnormals, negative zero, infinities.
    raw = draw(st.binary(min_size=size, max_size=size))
    return np.frombuffer(raw, dtype).reshape(shape)


scalars = arrays(shapes=((),)).filter(lambda a: np.isfinite(a) and a > 0)
leaves = st.one_of(st.none(), st.floats(1e-30, 1e30), scalars)
axes = st.sampled_from([None, "a", ("b", "c")])
sizes = st.one_of(st.none(), st.integers(1, 10**6))


def _are_sinks(array):
    return not (np.isnan(array) | (array == np.inf)).any()


FIELDS = dict(
    runtime_dtype=st.sampled_from([None, *FLOATS]),
    runtime_softmax_dtype=st.sampled_from([None, *FLOATS]),
    sequence_axis_name=st.text(min_size=1),
    mesh=st.sampled_from([None, AbstractMesh((2, 4), ("a", "b"))]),
    # cuDNN goes with some backends only: see kernels/test_cudnn.py.
    platform=st.sampled_from([x for x in Platform if x is not Platform.CUDNN]),
    backend=st.sampled_from([*Backend]),
    partition_axis=st.fixed_dictionaries(
        dict(batch_axis=axes, head_axis=axes, generation_head_axis=axes)
    ),
    scan_ring_attention=st.booleans(),
    softmax_scale=leaves,
    dropout_prob=st.floats(0, 1, exclude_max=True),
    blocksize_q=sizes,
    blocksize_k=sizes,
    blocksize_b=sizes,
    logits_soft_cap=leaves,
    softmax_aux=st.one_of(st.none(), arrays(shapes=((4,), (1, 3), (2, 2))).filter(_are_sinks)),
)
