"""`supports` says what the call does, without raising."""

import jax
import jax.numpy as jnp
import pytest

from eqattn import (
    ALiBi,
    attention,
    AttentionImpl,
    AttentionMetadata as Metadata,
    AttentionOutput,
    Blockwise,
    Causal,
    Dense,
    KeyPadding,
    MaskFn,
    Ragged,
    Ring,
    ScoreFn,
    Selected,
    SlidingWindow,
    T5Bias,
    Tree,
    Ulysses,
)
from eqattn._problem.storage import Stored


pytestmark = pytest.mark.usefixtures("unchecked")
T = 16
QUERY, KEY = jnp.ones((2, T, 4, 8)), jnp.ones((2, T, 2, 8))
TABLE = jnp.arange(T)
KERNEL = Metadata(platform="pallas", backend="tpu")
HOPPER = Metadata(platform="pallas", backend="cuda")
TRITON = Metadata(platform="pallas", backend="triton")
SCORE_FN = ScoreFn(lambda logit, b, h, q, k: logit)
GATHERS = ScoreFn(lambda logit, b, h, q, k: logit + TABLE[q * k].astype(logit.dtype))
BY_DIFFERENCE = ScoreFn(lambda logit, b, h, q, k: logit + TABLE[q - k].astype(logit.dtype))
PLAIN = Blockwise(Metadata())
MESH = jax.make_mesh((2,), ("sp",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
RING = Metadata(platform="pallas", backend="tpu", mesh=MESH, sequence_axis_name="sp")
FOUND_LATE = (
    "gather",
    "concatenate",
    "written for jax 0.12",
)  # as the program is lowered, with another message
INTERPRETED = {x: Metadata(platform="interpret", backend=x) for x in ("tpu", "cuda", "triton")}
T5 = T5Bias(jnp.zeros((32, 4)))


class NoScores(AttentionImpl):
    @classmethod
    def get_impl_name(cls):
        return "no-scores"

    def forward_native(
        self,
        q,
        k,
        v,
        mask=None,
        bias=None,
        init_bias=None,
        deterministic=False,
        dropout_rng=None,
        causal=True,
    ):
        return AttentionOutput(attention_outputs=q)


# A strategy, the keywords of a call, and what the refusal names; None if the call runs.
CASES = {
    "nothing": (PLAIN, {}, None),
    "everything": (
        PLAIN,
        dict(mask=TABLE < 8, bias=jnp.ones((T, T)), score=[ALiBi.geometric(4)], q_offset=TABLE[:2]),
        None,
    ),
    "inference": (Blockwise(Metadata(dropout_prob=0.5)), dict(inference=True), None),
    "traced inference": (PLAIN, dict(inference="no"), "inference"),
    "blocks of the batch": (Blockwise(Metadata(blocksize_b=4)), {}, "blocksize_b=4"),
    "precision": (Blockwise(Metadata(), precision="bogus"), {}, "recision"),
    "ring without a mesh": (Ring(Metadata(), axis_name="sp"), {}, "'sp'"),
    "ulysses without a mesh": (Ulysses(Metadata(), axis_name="sp"), {}, "'sp'"),
    "ring of one device": (Ring(Metadata()), {}, None),
    "weights": (PLAIN, dict(return_weights=True), "return_weights"),
    "dense weights": (Dense(Metadata()), dict(return_weights=True), None),
    "mask by name": (PLAIN, dict(mask="causal"), None),
    "mask by a wrong name": (PLAIN, dict(mask="casual"), "'full'"),
    "distances in a tree": (
        PLAIN,
        dict(mask=Tree(jnp.maximum(TABLE - 2, -1)) & SlidingWindow(3, 0)),
        None,
    ),
    "two trees": (PLAIN, dict(mask=Tree(TABLE - 1) | Tree(TABLE * 0 - 1)), "where tokens stand"),
    "one tree twice": (PLAIN, dict(mask=Tree(TABLE - 1) & ~Tree(TABLE - 1)), None),
    "mask of numbers": (PLAIN, dict(mask=jnp.ones((T, T))), "boolean"),
    "score": (PLAIN, dict(score=3), "score modules"),
    "one of the scores": (PLAIN, dict(score=[SCORE_FN, 3]), "score modules"),
    "float8 query": (PLAIN, dict(dtype=jnp.float8_e4m3fn), "bfloat16 or wider"),
    "integer query": (PLAIN, dict(dtype=jnp.int32), "floating"),
    "half a query": (PLAIN, dict(dtype="float16"), None),
    "half a query in a kernel": (Blockwise(KERNEL), dict(dtype=jnp.float16), "not float16"),
    "a narrow query in a kernel": (Blockwise(KERNEL), dict(dtype=jnp.bfloat16), None),
    "a double query, which is single without x64": (Blockwise(KERNEL), dict(dtype="float64"), None),
    "single precision on tensor cores": (Blockwise(HOPPER), dict(dtype=QUERY.dtype), "not float32"),
    "single precision by Triton": (Blockwise(TRITON), dict(dtype=QUERY.dtype), None),
    "single precision, which Triton multiplies": (
        Blockwise(HOPPER),
        dict(dtype=QUERY.dtype, mask=Causal()),
        "use platform='triton', 'auto' or 'xla'.",
    ),
    "single precision, and what Triton lacks, too": (
        Blockwise(HOPPER),
        dict(dtype=QUERY.dtype, mask=MaskFn(lambda b, h, q, k: TABLE[q * k] >= k)),
        "use platform='auto' or 'xla'.",
    ),
    "half precision on tensor cores": (
        Blockwise(HOPPER),
        dict(dtype=jnp.float16),
        None if jax.__version_info__ >= (0, 12) else "written for jax 0.12",
    ),
    "integer bias": (PLAIN, dict(bias=jnp.ones((T, T), int)), "floating"),
    "float offset": (PLAIN, dict(q_offset=1.5), "q_offset"),
    "offset and positions": (PLAIN, dict(q_offset=1, q_positions=TABLE), "not both"),
    "not declared": (NoScores(Metadata()), dict(score=SCORE_FN), "score: not supported"),
    "not needed": (NoScores(Metadata()), dict(mask=Causal()), None),
    "no kernel on cpu": (Blockwise(Metadata(platform="pallas", backend="cpu")), {}, "on cpu"),
    "kernel": (
        Blockwise(KERNEL),
        dict(mask=Causal() & SlidingWindow(3, 0), score=ALiBi.geometric(4), bias=jnp.ones((T, T))),
        None,
    ),
    "kernel of rows": (Ragged(KERNEL), dict(mask=KeyPadding(TABLE[1:3])), None),
    "kernel of a function": (Blockwise(KERNEL), dict(score=SCORE_FN), None),
    "kernel of a lookup": (
        Blockwise(KERNEL),
        dict(score=ScoreFn(lambda s, b, h, q, k: jnp.where(TABLE[q] > TABLE[k], s, -s))),
        None,
    ),
    "kernel of a function that gathers": (Blockwise(KERNEL), dict(score=GATHERS), "ScoreFn has a"),
    "kernel of a table": (Blockwise(KERNEL), dict(score=T5Bias(jnp.zeros((32, 4)))), None),
    "kernel of differences": (
        Blockwise(KERNEL),
        dict(mask=MaskFn(lambda b, h, q, k: TABLE[q - k] > 3)),
        None,
    ),
    "kernel of a tree": (Blockwise(KERNEL), dict(mask=Tree(TABLE - 1)), None),
    "kernel of a table in a tree": (
        Blockwise(KERNEL),
        dict(mask=Tree(TABLE - 1) & SlidingWindow(3, 0), score=T5Bias(jnp.zeros((32, 4)))),
        "gather",
    ),
    "kernel of differences in a tree": (
        Blockwise(KERNEL),
        dict(mask=Tree(TABLE - 1), score=BY_DIFFERENCE),
        "a ScoreFn has a",
    ),
    "kernel of differences in a list of keys": (
        Blockwise(KERNEL),
        dict(mask=Causal() & Selected(jnp.zeros((1, 1, T, 3), int)), score=BY_DIFFERENCE),
        "a ScoreFn has a",
    ),
    "kernel of differences at positions": (
        Blockwise(KERNEL),
        dict(score=BY_DIFFERENCE, kv_positions=TABLE),
        "a ScoreFn has a",
    ),
    "kernel of a table in a ring": (
        Ring(RING),
        dict(score=T5Bias(jnp.zeros((32, 4)))),
        "gather",
    ),
    "kernel of differences in a ring": (Ring(RING), dict(score=BY_DIFFERENCE), "a ScoreFn has a"),
    "kernel of differences in a ring of one device": (
        Ring(KERNEL),
        dict(score=BY_DIFFERENCE),
        None,
    ),
    "kernel of a table where heads are exchanged": (
        Ulysses(RING),
        dict(mask=MaskFn(lambda b, h, q, k: TABLE[q - k] > 3)),
        "gather",
    ),
    "kernel of a table over rows": (
        Ragged(KERNEL),
        dict(score=T5Bias(jnp.zeros((32, 4)))),
        "gather",
    ),
    "kernel that gathers": (
        Blockwise(KERNEL),
        dict(mask=Causal() & MaskFn(lambda b, h, q, k: TABLE[q * k] >= k)),
        "gather",
    ),
    "interpreted kernel of a table in a tree": (
        Blockwise(INTERPRETED["tpu"]),
        dict(mask=Tree(TABLE - 1) & SlidingWindow(3, 0), score=T5),
        "gather",
    ),
    "interpreted kernel of a table over rows": (
        Ragged(INTERPRETED["tpu"]),
        dict(score=T5),
        "gather",
    ),
    "interpreted kernel of a table by Triton": (
        Blockwise(INTERPRETED["triton"]),
        dict(score=T5),
        None,
    ),
    "interpreted kernel that gathers": (
        Blockwise(INTERPRETED["tpu"]),
        dict(mask=MaskFn(lambda b, h, q, k: TABLE[q * k] >= k)),
        "a MaskFn has a gather",
    ),
    "kernel that looks up": (
        Blockwise(KERNEL),
        dict(mask=Causal() & MaskFn(lambda b, h, q, k: TABLE[q] >= k)),
        None,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_supports_is_what_the_call_does(name):
    strategy, features, refused = CASES[name]
    able = strategy.supports(**features)
    assert able.ok == (refused is None) and (able.ok or refused in able.reason), able.reason

    features = dict(features)
    dtype = features.pop("dtype", QUERY.dtype)

    def call(query, key_):
        # An array of so few keys is copied, and calls in place are those that `supports` tells of.
        key_ = Stored(key_) if isinstance(strategy, Ragged) else key_
        return attention(query, key_, key_, strategy, **features).attention_outputs

    def run():
        traced = jax.jit(call).trace(*(jax.ShapeDtypeStruct(x.shape, dtype) for x in (QUERY, KEY)))
        backend = strategy.metadata.backend.value
        if backend == "triton" and jax.__version_info__ >= (0, 11):
            return  # It asks for a GPU, or for the name of one; tests/unit/kernels/test_found.py.
        if backend in ("tpu", "cuda", "triton"):
            traced.lower(lowering_platforms=("tpu" if backend == "tpu" else "cuda",))

    if refused is None:
        return run()
    with pytest.raises((TypeError, ValueError)) as caught:
        run()
    if refused in FOUND_LATE:
        assert refused in str(caught.value)
    else:
        assert str(caught.value) == able.reason


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="this jax has kernels for Hopper")
def test_older_versions_are_told_of_triton():
    """By `supports`, and by a call as it is lowered."""
    how = Blockwise(HOPPER)
    assert "use platform='triton', 'auto' or 'xla'." in how.supports(dtype=jnp.bfloat16).reason
    narrow = QUERY.astype(jnp.bfloat16), *[KEY.astype(jnp.bfloat16)] * 2
    call = jax.jit(lambda *xs: attention(*xs, how).attention_outputs).trace(*narrow)
    with pytest.raises(ValueError, match=r"platform='triton' has one, and platform='auto' or"):
        call.lower(lowering_platforms=("cuda",))


def test_any_value_and_another_platform():
    true = dict.fromkeys(("mask", "bias", "score", "key", "q_offset", "kv_positions"), True)
    assert PLAIN.supports(**true, inference=True).ok
    assert PLAIN.supports(score=SCORE_FN).ok
    reason = PLAIN.supports(score=GATHERS, platform="pallas", backend="tpu").reason
    assert "ScoreFn" in reason and "platform='pallas'" in reason
    assert Blockwise(KERNEL).supports(score=SCORE_FN, platform="xla").ok
