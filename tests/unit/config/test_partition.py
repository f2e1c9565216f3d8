import types

import equinox as eqx
import jax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

from eqattn._config.metadata import AttentionMetadata
from eqattn._config.partition import (
    fitted,
    PartitionAxis,
    PartitionManager,
    trimmed,
    with_axes_kept,
)
from eqattn._config.platform import RuntimeMode


AXES = PartitionAxis(
    batch_axis=("fsdp", "dp"),
    query_sequence_axis="qs",
    key_sequence_axis="ks",
    head_axis="h",
    kv_head_axis="kh",
    attention_dim_axis="d",
    attention_kv_dim_axis="kd",
    bias_head_sequence_axis="bh",
    bias_key_sequence_axis="bk",
    generation_batch_axis="gb",
    generation_query_sequence_axis="gqs",
    generation_key_sequence_axis="gks",
    generation_head_axis="gh",
    generation_kv_head_axis="gkh",
    generation_attention_dim_axis="gd",
    generation_attention_kv_dim_axis="gkd",
)
BATCH = ("fsdp", "dp")


def expected(generates, bthd, mni):
    if generates:
        b, t, s, h, k, d, e = "gb", "gqs", "gks", "gh", "gkh", "gd", "gkd"
    else:
        b, t, s, h, k, d, e = BATCH, "qs", "ks", "h", "kh", "d", "kd"
    k, e = (h, d) if mni else (k, e)
    q = P(b, t, h, d) if bthd else P(b, h, t, d)
    kv = P(b, s, k, e) if bthd else P(b, k, s, e)
    return q, kv, kv, P(b, "bh", t, "bk"), P(b, None, t, "bk"), q


@pytest.mark.parametrize("mni", [False, True])
@pytest.mark.parametrize("bthd", [True, False])
@pytest.mark.parametrize("mode", list(RuntimeMode))
def test_get_shardings(mode, bthd, mni):
    m = AttentionMetadata(partition_axis=AXES)
    generates = mode in ("__autoregressive__", "__insert__")
    specs = m.get_shardings(mode, bthd, mni)
    assert specs == expected(generates, bthd, mni)
    assert specs == m.get_shardings(mode.value, BTHD=bthd, qkv_mni_sharding=mni)
    assert isinstance(specs, tuple) and all(isinstance(s, P) for s in specs)


def test_default_shardings_are_trimmed():
    m = AttentionMetadata()
    q, kv, bias = P(BATCH, "sp", "tp"), P(BATCH, "sp", "tp"), P(BATCH, None, "sp")
    assert m.get_shardings("train") == (q, kv, kv, bias, bias, q)
    assert m.get_shardings("__prefill__", False) == (
        *[P(BATCH, "tp", "sp")] * 3, bias, bias, P(BATCH, "tp", "sp"),
    )  # fmt: skip
    # A generation step has few queries: they are not sharded over the sequence axis.
    q = P(BATCH, None, "tp")
    for mode in ("__autoregressive__", "__insert__"):
        assert m.get_shardings(mode) == (q, kv, kv, P(BATCH), P(BATCH), q)


def test_the_partition_manager_decides():
    manager = PartitionManager(AXES)
    m = AttentionMetadata(partition_manager=manager)
    assert m.get_shardings("train") == expected(False, True, False)
    assert m.partition_axis == AXES


@pytest.mark.parametrize("mode", ["__train__", "train", "TRAIN", RuntimeMode.TRAIN])
def test_modes_in_any_spelling(mode):
    assert RuntimeMode(mode) is RuntimeMode.TRAIN
    assert RuntimeMode.TRAIN == "__train__" and str(RuntimeMode.TRAIN) == "__train__"
    AttentionMetadata().get_shardings(mode)


def test_unknown_mode_lists_the_modes():
    with pytest.raises(ValueError, match="'decode'.*__autoregressive__.*__insert__"):
        AttentionMetadata().get_shardings("decode")


def test_partition_axis_defaults_follow():
    a = PartitionAxis()
    assert (a.batch_axis, a.sequence_axis, a.head_axis) == (BATCH, "sp", "tp")
    assert a.query_sequence_axis == a.key_sequence_axis == a.generation_key_sequence_axis == "sp"
    assert a.kv_head_axis == a.generation_head_axis == a.generation_kv_head_axis == "tp"
    assert a.attention_dim_axis is a.bias_head_sequence_axis is a.bias_key_sequence_axis is None
    assert a.generation_query_sequence_axis is a.generation_attention_dim_axis is None
    a = PartitionAxis(sequence_axis="s", head_axis="h", kv_head_axis=None, batch_axis="b")
    assert a.query_sequence_axis == a.key_sequence_axis == a.generation_key_sequence_axis == "s"
    assert a.generation_head_axis == "h" and a.generation_kv_head_axis is None
    assert a.generation_batch_axis == "b"


def test_partition_axis_is_canonical_and_has_no_leaves():
    a = PartitionAxis(batch_axis=["x", "y"], head_axis=("h",), attention_dim_axis=())  # pyright: ignore
    b = PartitionAxis(batch_axis=("x", "y"), head_axis="h", attention_dim_axis=None)
    assert a == b and hash(a) == hash(b) and jax.tree.structure(a) == jax.tree.structure(b)
    assert jax.tree.leaves(a) == [] and isinstance(a, eqx.Module)
    with pytest.raises(ValueError, match="repeated"):
        PartitionAxis(batch_axis=("x", "x"))
    with pytest.raises(TypeError, match="mesh axis"):
        PartitionAxis(batch_axis=3)  # pyright: ignore
    with pytest.raises(TypeError):
        PartitionAxis(hidden_axis="x")  # pyright: ignore


def test_foreign_partition_objects():
    foreign = types.SimpleNamespace(batch_axis="b", head_axis="h", decode_head_axis="dh", mlp="m")
    axis = PartitionAxis(batch_axis="b", head_axis="h", generation_head_axis="dh")
    m = AttentionMetadata(partition_axis=foreign)
    assert m.partition_axis == axis
    manager = types.SimpleNamespace(paxis=foreign)
    assert AttentionMetadata(partition_manager=manager).partition_axis == axis
    assert AttentionMetadata(partition_axis={"batch_axis": "b"}).partition_axis.batch_axis == "b"
    with pytest.raises(ValueError, match="mlp_axis"):
        AttentionMetadata(partition_axis={"mlp_axis": "b"})


def test_resolve():
    manager = PartitionManager(AXES)
    assert manager.resolve(["batch", None, "_", "head_dim"], "train") == P(BATCH, None, None, "d")
    assert manager.resolve(["__BATCH__", "KV_LENGTH"], "insert") == P("gb", "gks")
    assert manager.resolve([["batch", "length"], None], "train") == P(("fsdp", "dp", "sp"))
    assert manager.resolve([], "train") == P()
    assert PartitionManager() == PartitionManager(PartitionAxis())
    with pytest.raises(ValueError, match="Unknown logical axis 'embed'.*kv_head_dim"):
        manager.resolve(["embed"], "train")
    with pytest.raises(ValueError, match="'tp'.*change the PartitionAxis"):
        PartitionManager().resolve(["head", "kv_head"], "train")


def test_trimmed():
    assert trimmed(P("a", None, None)) == P("a") != P("a", None)
    assert trimmed(P(None, "a")) == P(None, "a") and trimmed(P(None)) == P()
    spec = trimmed(P("a", None, unreduced={"b"}))
    assert spec == P("a", unreduced={"b"})


@pytest.mark.parametrize(
    "spec, shape, kept",
    [
        (P("a", "b"), (4, 6), P("a", "b")),
        (P("a", "b"), (3, 6), P(None, "b")),
        (P(("a", "b")), (4,), P("a")),
        (P(("b", "a")), (6,), P(("b", "a"))),
        (P(("a", "b")), (3,), P("b")),
        (P("x", ("x", "a")), (4, 4), P(None, "a")),
        (P("a", None, P.UNCONSTRAINED), (2, 2, 5), P("a", None, P.UNCONSTRAINED)),
        (P("a"), (2, 3, 4), P("a")),
        (P("a", None), (2,), P("a")),
        (P("a"), (0,), P("a")),
        (P(("a", "b", "c")), (6,), P(("a", "b"))),
    ],
)
def test_fitted(spec, shape, kept):
    mesh = AbstractMesh((2, 3, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    assert fitted(spec, shape, mesh) == kept


def test_fitted_with_too_many_entries_raises():
    with pytest.raises(ValueError, match="more entries"):
        fitted(P(None, "a"), (2,), AbstractMesh((2,), ("a",)))


def test_some_axes_stay_sharded():
    spec = P("a", "b", "c")
    assert with_axes_kept(spec, None, None, None) == spec
    assert with_axes_kept(spec, (0, 2), None, None) == P("a", None, "c")
    assert with_axes_kept(spec, (1,), P("x", "y"), None) == P(None, "y")
    assert with_axes_kept(P("a"), (1, 0), None, 2) == P("a")
    for index in (3, -1):
        with pytest.raises(ValueError, match=f"preserved index {index} .* 3 axes"):
            with_axes_kept(spec, (index,), None, None)
