import types

import jax.numpy as jnp
import pytest
from _same import same
from jax.sharding import AbstractMesh

from eqattn._config.metadata import AttentionMetadata
from eqattn._config.partition import PartitionAxis, PartitionManager
from eqattn._config.platform import Backend


class Config:
    attn_dtype = "bfloat16"
    attn_softmax_dtype = jnp.float32
    sequence_axis_name = "ring"
    mesh = AbstractMesh((2,), ("ring",))
    platform = "jax"
    backend = None
    partition_axis = types.SimpleNamespace(batch_axis="dp", head_axis="m", decode_head_axis="n")
    scan_attention_layers = False
    blocksize_q, blocksize_k, blocksize_b = 32, 64, 1
    attn_logit_softcapping = 30
    dropout_prob = 0.9
    hidden_size = 7


@pytest.mark.parametrize(
    "config",
    [Config, Config(), {k: v for k, v in vars(Config).items() if not k.startswith("__")}],
    ids=["class", "object", "mapping"],
)
def test_from_config_reads_the_table(config):
    m = AttentionMetadata.from_config(config, softmax_scale=0.25, dropout_prob=0.1)
    assert same(
        m,
        AttentionMetadata(
            "bfloat16", "float32", "ring", Config.mesh, "xla", "any",
            PartitionAxis(batch_axis="dp", head_axis="m", generation_head_axis="n"),
            scan_ring_attention=False, softmax_scale=0.25, dropout_prob=0.1,
            blocksize_q=32, blocksize_k=64, blocksize_b=1, logits_soft_cap=30.0,
        ),
    )  # fmt: skip
    assert same(m, AttentionMetadata(base_config=config, softmax_scale=0.25, dropout_prob=0.1))
    assert AttentionMetadata.from_config(config, None).dropout_prob == 0.0
    assert AttentionMetadata.from_config({"softmax_scale": 0.5}).softmax_scale == 0.5
    assert AttentionMetadata.from_config({"softmax_scale": 0.5}, None).softmax_scale is None
    with pytest.raises(ValueError, match="got None"):
        AttentionMetadata.from_config(None)


def test_what_is_given_wins_over_the_base_config():
    axis = PartitionAxis(head_axis="given")
    m = AttentionMetadata("float16", base_config=Config, partition_axis=axis, blocksize_q=None)
    assert m.runtime_dtype == jnp.float16 and m.blocksize_q is None and m.blocksize_k == 64
    assert m.partition_axis == axis == m.partition_manager.partition_axis
    config = dict(backend="tpu", partition_manager=PartitionManager(axis), platform="pallas")
    m = AttentionMetadata(base_config=config, platform="gpu", partition_axis=PartitionAxis())
    assert m.backend is Backend.GPU and m.partition_axis == PartitionAxis()
    assert AttentionMetadata(base_config=config).partition_axis == axis


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.bfloat16", jnp.bfloat16])
@pytest.mark.parametrize("name", ["dtype", "torch_dtype", "attn_dtype", "runtime_dtype"])
def test_dtype_of_a_config(name, dtype):
    assert AttentionMetadata(base_config={name: dtype}).runtime_dtype == jnp.bfloat16


def test_base_config_is_read_once():
    config = types.SimpleNamespace(blocksize_q=8)
    m = AttentionMetadata(base_config=config)
    config.blocksize_q = 99
    assert m.blocksize_q == 8 and m.base_config is None and same(m, m.replace())
    assert same(m, AttentionMetadata(blocksize_q=8))
    assert same(m, AttentionMetadata(base_config=m))


@pytest.mark.parametrize("config", [object(), {}, {"hidden_size": 3}, "config"])
def test_config_with_nothing_to_read_raises(config):
    with pytest.raises(ValueError, match="none of the attributes.*attn_dtype"):
        AttentionMetadata(base_config=config)


def test_set_attrs_carefully_returns_a_new_instance():
    m = AttentionMetadata(blocksize_q=8)
    assert m.set_attrs_carefully("blocksize_q", 1).blocksize_q == 8
    out = m.set_attrs_carefully("blocksize_k", 512)
    assert out.blocksize_k == 512 and m.blocksize_k is None and out is not m
    assert m.set_attrs_carefully("runtime_softmax_dtype", "f4", "attn_softmax_dtype") is not m
    config = {"kv_block": 64, "blocksize_k": None}

    def pick(*args, **kwargs):
        return m.set_attrs_carefully("blocksize_k", 512, *args, **kwargs).blocksize_k

    assert pick("kv_block", base_config=config) == 64
    assert pick("kv_block", False, base_config=config) == 512
    assert pick(base_config=config) == 512
    assert pick("absent", base_config=config) == 512
    with pytest.raises(ValueError, match="kv_block.*base_config="):
        pick("kv_block")
    with pytest.raises(ValueError, match="block_q"):
        m.set_attrs_carefully("block_q", 1)


def test_what_is_read_and_what_wins():
    """The first attribute of a field wins, what is unset or dropout is not read, and a manager that
    is given wins over the axes of the config.
    """
    config = types.SimpleNamespace(
        runtime_dtype="bfloat16",
        dtype="float16",
        softmax_scale=...,
        blocksize_q=4,
        dropout_prob=0.5,
    )
    made = AttentionMetadata(base_config=config)
    assert made.runtime_dtype == jnp.bfloat16 and made.blocksize_q == 4
    assert made.softmax_scale is None and made.dropout_prob == 0
    manager = PartitionManager(PartitionAxis(batch_axis="rows"))
    config = types.SimpleNamespace(partition_axis=PartitionAxis(head_axis="heads"), blocksize_k=8)
    made = AttentionMetadata(partition_manager=manager, base_config=config)
    assert made.partition_manager == manager and made.partition_axis == manager.partition_axis
    assert made.blocksize_k == 8
