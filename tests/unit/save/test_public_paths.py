"""Files name classes by their public names, so that they load whatever moves inside of eqattn."""

import dataclasses
import importlib
import io
import json
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import pytest

import eqattn
from eqattn import AttentionImpl, AttentionMetadata, Causal, load, masks, save, scores, Zigzag
from eqattn._misc import Static
from eqattn._problem.operands import BlockOperand
from eqattn._save import _digest, _line, _path, found_at


class Holder(AttentionImpl):
    """A strategy that holds masks and scores."""

    metadata: AttentionMetadata
    parts: Any = ()

    @classmethod
    def get_impl_name(cls):
        return "holder"

    def forward_native(self, q, k, v, *args, **kwargs):
        raise NotImplementedError


def holder():
    mask = Causal() & masks.SlidingWindow(3, 0) | ~masks.PrefixLM(jnp.array([2, 3]))
    parts = mask, scores.SoftCap(jnp.array(30.0)), scores.ALiBi(jnp.ones(4)), Zigzag()
    return Holder(AttentionMetadata(), parts)


def written(obj) -> bytes:
    file = io.BytesIO()
    save(file, obj)
    return file.getvalue()


def paths(data: bytes) -> set[str]:
    """The classes that a file names."""
    return set(re.findall(r'"class": "([^"]+)"', data.split(b"\n")[0].decode()))


@pytest.mark.parametrize("path", ["eqattn:Balanced", "eqattn.masks:Tree", "eqattn._masks:Tree"])
def test_a_file_may_name_what_is_imported_late(path, monkeypatch):
    """In a process that has not asked for the name before, as is each that begins with a file."""
    module, name = path.replace("_masks", "masks").split(":")
    late = getattr(importlib.import_module(module), name)
    for holder in (eqattn, masks):
        monkeypatch.delitem(vars(holder), name, raising=False)
    assert found_at(path) is late
    assert found_at(f"{module}:Nothing") is None


def test_a_file_names_no_private_module():
    named = {p for p in paths(written(holder())) if p.startswith("eqattn")}
    assert {"eqattn:Causal", "eqattn.masks:And"} <= named
    assert not [p for p in named if "._" in p]


def modules():
    return [
        importlib.import_module(m.name)
        for m in pkgutil.walk_packages(eqattn.__path__, "eqattn.")
        if not m.name.startswith(("eqattn.kernels", "eqattn.__main__"))
    ]


def test_every_module_of_the_package_is_public_or_refused():
    """No class can be written under a private name: it has a public one, or saving it raises."""
    classes = {
        c for m in modules() for c in vars(m).values()
        if isinstance(c, type) and c.__module__ == m.__name__
        and (dataclasses.is_dataclass(c) or issubclass(c, eqx.Module))
    }  # fmt: skip
    assert Causal in classes and Static in classes
    refused = set()
    for c in classes:
        try:
            assert "._" not in _path(c), c
        except TypeError:
            refused.add(c.__name__)
    assert "BlockOperand" in refused and not refused & {"SoftCap", "KVCache", "Rotary", "Ring"}


def edited(data: bytes, names: dict[str, str]) -> bytes:
    """The same file as if classes had had these paths."""
    line, _, content = data.partition(b"\n")
    text = line.decode()
    for new, old in names.items():
        assert new in text, new
        text = text.replace(f'"{new}"', f'"{old}"')
    header = json.loads(text)
    header.pop("sha256")
    header["sha256"] = _digest(header)
    return _line(header) + b"\n" + content


def test_files_of_version_0_1_load(registry):
    registry.register(Holder)
    data = written(holder())
    old = {
        "eqattn:Causal": "eqattn._masks:Causal",
        "eqattn:SlidingWindow": "eqattn._masks:SlidingWindow",
        "eqattn.masks:And": "eqattn._mask_base:And",
        "eqattn:Zigzag": "eqattn._ring_layout:Zigzag",
    }
    old |= {p: p.replace("eqattn:", "eqattn._scores:") for p in paths(data) if "SoftCap" in p}
    assert eqx.tree_equal(load(io.BytesIO(edited(data, old))), holder())


def test_a_private_module_moves(registry, tmp_path):
    """Saved here, loaded by a copy of the package in which private modules have other names."""
    package = tmp_path / "eqattn"
    shutil.copytree(Path(eqattn.__file__).parent, package)
    for old, new in (("scores/_dropout", "scores/_elsewhere"), ("masks/_causal", "masks/_order")):
        (package / f"{old}.py").rename(package / f"{new}.py")
        was, now = (Path(p).name for p in (old, new))
        for path in package.rglob("*.py"):
            path.write_text(re.sub(rf"\b{was}\b", now, path.read_text()))
    registry.register(Holder)
    (tmp_path / "saved").write_bytes(written(holder()))
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import eqattn\n"
        "assert eqattn.__file__.startswith(sys.argv[1]), eqattn.__file__\n"
        "assert eqattn.Causal.__module__ == 'eqattn.masks._order'\n"
        "from typing import Any\n"
        "@eqattn.AttentionRegistry.register\n"
        "class Holder(eqattn.AttentionImpl):\n"
        "    metadata: eqattn.AttentionMetadata\n"
        "    parts: Any = ()\n"
        "    @classmethod\n"
        "    def get_impl_name(cls): return 'holder'\n"
        "    def forward_native(self, q, k, v, *args, **kwargs): raise NotImplementedError\n"
        "loaded = eqattn.load(sys.argv[1] + '/saved')\n"
        "assert type(loaded.parts[1]) is eqattn.scores.SoftCap\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr


def test_what_is_private_is_refused():
    with pytest.raises(TypeError, match="BlockOperand is private to eqattn"):
        _path(BlockOperand)
