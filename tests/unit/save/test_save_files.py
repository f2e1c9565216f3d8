"""The files of `eqattn.save`: truncated, damaged, foreign, several in one."""

import hashlib
import io
import json
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqattn import AttentionMetadata, Blockwise, load, save
from eqattn._save import _digest, _line
from eqattn.scores import SoftCap


@pytest.fixture
def data():
    file = io.BytesIO()
    save(file, Blockwise(AttentionMetadata(blocksize_q=128, softmax_aux=jnp.arange(64.0))))
    return file.getvalue()


def test_truncated_anywhere(data):
    for size in range(len(data)):
        with pytest.raises(ValueError, match="truncated|empty|was not written by eqattn.save"):
            load(io.BytesIO(data[:size]))
    load(io.BytesIO(data))


def test_one_wrong_bit_anywhere(data):
    """But for white space, which means nothing in JSON, there is no such bit that passes."""
    for at in range(len(data)):
        for bit in (0, 3, 5):
            wrong = bytearray(data)
            wrong[at] ^= 1 << bit
            with pytest.raises(ValueError, match="damaged|written by|truncated|has format"):
                load(io.BytesIO(wrong))


def first_format(described, content):
    """A file as format 1 wrote it."""
    header = {"eqattn": 1, "library": "0.1.0", "object": described}
    header["leaves"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    return io.BytesIO(_line(header | {"sha256": _digest(header)}) + b"\n" + content)


class Capped(Blockwise):
    caps: tuple = ()

    @classmethod
    def get_impl_name(cls):
        return "capped"


@pytest.mark.parametrize("like", [False, True])
def test_format_1_had_its_constants_among_the_leaves(like, registry):
    """Written with the metadata's dtype as it then was by default."""
    registry.register(Capped)
    leaf = lambda kind, dtype, *shape: {
        "$leaf": {"kind": kind, "dtype": dtype, "shape": list(shape), "weak_type": False}
    }
    metadata = {
        **AttentionMetadata("float32").to_dict(),
        "base_config": None,
        "softmax_scale": leaf("float", "float64"),
        "logits_soft_cap": leaf("jax", "float32"),
        "softmax_aux": leaf("jax", "float16", 3),
    }
    fields = {
        "metadata": {"$metadata": metadata},
        "precision": None,
        "fused_backward": True,
        "caps": {
            "$tuple": [
                {"$object": {"class": "eqattn.scores:SoftCap", "fields": {"cap": cap}}}
                for cap in (leaf("float", "float64"), leaf("jax", "float32"))
            ]
        },
    }
    described = {"$strategy": {"name": "capped", "fields": fields}}
    aux = np.array([1, -2, 0.5], np.float16)
    numbers = (np.float64(0.3), np.float32(30), aux, np.float64(50), np.float32(5))
    content = b"".join(x.tobytes() for x in numbers)
    want = Capped(
        AttentionMetadata(
            "float32",
            softmax_scale=0.3,
            logits_soft_cap=jnp.float32(30),
            softmax_aux=jnp.asarray(aux),
        ),
        caps=(SoftCap(50.0), SoftCap(jnp.float32(5))),
    )
    got = load(first_format(described, content), like=want if like else None)
    assert eqx.tree_equal(got, want) and jax.tree.structure(got) == jax.tree.structure(want)
    file = io.BytesIO()
    save(file, got)
    file.seek(0)
    assert eqx.tree_equal(load(file), want)
    assert b"eqattn._" not in file.getvalue()  # a file names public paths only


def test_foreign_files(tmp_path, data):
    for content in (b"\x93NUMPY\x01\x00" + bytes(64), b'{"format": 1}\n', b'{"eqattn": }\n'):
        with pytest.raises(ValueError, match="not written by eqattn.save|damaged"):
            load(io.BytesIO(content))
    path = tmp_path / "x"
    path.write_bytes(data + b"more")
    with pytest.raises(ValueError, match="goes on where save ended"):
        load(path)
    newer = data.replace(b'{"eqattn": 2', b'{"eqattn": 3', 1)
    with pytest.raises(ValueError, match="format 3 of eqattn .* reads formats 1 to 2"):
        load(io.BytesIO(newer))
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "absent")


def test_a_file_chooses_no_code(data):
    """A class that is not imported is not imported, and only data classes are instances."""
    line, _, content = data.partition(b"\n")
    header = json.loads(line)

    def refused(precision, message):
        header["object"]["$strategy"]["fields"]["precision"] = precision
        header.pop("sha256", None)
        header["sha256"] = _digest(header)
        with pytest.raises(ValueError, match=message):
            load(io.BytesIO(_line(header) + b"\n" + content))

    for path in ("antigravity:open_new", "os:_wrap_close", "subprocess:Popen", "builtins:eval"):
        refused({"$object": {"class": path, "fields": {}}}, f"needs the class {path}")
    refused({"$object": {"class": "eqattn:Zigzag", "fields": {"a": 1}}}, r"Zigzag has no \['a'\]")
    refused({"$enum": ["eqattn:Zigzag", "a"]}, "not as save writes it")
    refused({"$object": {}}, "not as save writes it")
    assert "antigravity" not in sys.modules


def test_several_in_one_file(tmp_path):
    objects = [Blockwise(AttentionMetadata(softmax_scale=0.1)), AttentionMetadata(jnp.float16)]
    with open(tmp_path / "several", "wb") as file:
        file.write(b"before")
        for obj in objects:
            save(file, obj)
        file.write(b"after")
    with open(tmp_path / "several", "rb") as file:
        assert file.read(6) == b"before"
        for obj in objects:
            assert eqx.tree_equal(load(file), obj)
        assert file.read() == b"after"


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_strategy(tmp_path, data):
    with pytest.raises(TypeError, match="a strategy or an AttentionMetadata.*got list"):
        save(tmp_path / "x", [1.0])  # pyright: ignore
    with pytest.raises(TypeError, match="like is a strategy.*got dict"):
        load(io.BytesIO(data), like={})  # pyright: ignore
    (tmp_path / "x").write_bytes(data)
    with (
        open(tmp_path / "x", encoding="latin1") as text,
        pytest.raises(ValueError, match="mode 'rb'"),
    ):
        load(text)  # pyright: ignore
    with (
        open(tmp_path / "x", encoding="utf-8") as text,  # in which the leaves are no text
        pytest.raises(ValueError, match="mode 'rb'"),
    ):
        load(text)  # pyright: ignore
    with pytest.raises(TypeError, match="mesh is a .* or None, got 'x'"):
        load(tmp_path / "x", mesh="x")
