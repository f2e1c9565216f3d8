"""What `import eqattn` loads and starts, in an interpreter of its own."""

import ast
import importlib
import json
import os
import pathlib
import subprocess
import sys

import pytest

import eqattn


ROOT = pathlib.Path(eqattn.__file__).parents[1]
FORBIDDEN = (
    "beartype eqattn._tools eqattn.viz eqattn.kernels.gpu eqattn.kernels.tpu concurrent.interpreters ejkernel hypothesis IPython jax._src.pallas "
    "jax.experimental.mosaic jax.experimental.pallas libtpu matplotlib optax pandas pytest scipy "
    "tensorflow tokamax torch tqdm triton"
).split()

# What a program does in the interpreter that has imported eqattn, in this order.
STAGES = {
    "layers": """
        assert "eqattn.nn" not in sys.modules
        layer = eqattn.nn.MultiheadAttention
        from eqattn import nn
        import eqattn.nn
        assert eqattn.nn is nn and nn.MultiheadAttention is layer
    """,
    "an unknown name": "eqattn.layers",
    "star": """
        own = {}
        exec("from eqattn import *", own)
        own = {n for n in own if n[0] != "_"}
        public = {n for n in dir(eqattn) if n[0] != "_"}
        rooms = {n for n in public if isinstance(getattr(eqattn, n), types.ModuleType)}
        assert sorted(own ^ (public - rooms)) == [
            "cache", "masks", "nn", "scores", "stats", "strategies"
        ], own ^ (public - rooms)
    """,
    "construction": """
        e = eqattn
        m = e.AttentionMetadata(softmax_scale=0.5, platform="tpu", blocksize_q=8)
        e.Blockwise(m), e.Dense(m), e.AttentionRegistry.create("blockwise", m)
        str(e.Causal() & e.SlidingWindow(3, 0) | ~e.PrefixLM(4))
        e.ScoreFn(lambda z, b, h, q, k: z)
    """,
    "metadata": """
        import numpy as np
        from eqattn import AttentionMetadata
        from jax.sharding import AbstractMesh
        m = AttentionMetadata("bfloat16", mesh=AbstractMesh((2,), ("sp",)), platform="tpu",
            softmax_scale=0.1, softmax_aux=np.zeros(3, np.float32), logits_soft_cap=3)
        m = AttentionMetadata.from_json(m.replace(blocksize_q=3).to_json())
        m.get_shardings("train")
    """,
    "JSON": """
        import eqattn._config.json
        assert json.JSONEncoder.default is encoder
    """,
    "devices": "jax.devices()",
    "no matplotlib": """
        sys.modules["matplotlib"] = None
        import eqattn.viz
    """,
}

PROGRAM = """
import json, sys, textwrap, types
encoder = json.JSONEncoder.default
import equinox
before = set(sys.modules)
import eqattn
found = {"before": sorted(before), "added": sorted(set(sys.modules) - before), "errors": {}}
import jax
for name, code in json.loads(sys.argv[1]).items():
    try:
        exec(textwrap.dedent(code), globals())
    except Exception as error:
        found["errors"][name] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def imported():
    """Under a platform that does not exist: starting any backend would raise."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "no_such_platform"}
    flags = "-W", "error::DeprecationWarning:eqattn"
    done = subprocess.run(
        [sys.executable, *flags, "-c", PROGRAM, json.dumps(STAGES)],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("stage", STAGES)
def test_in_an_interpreter_of_its_own(imported, stage):
    """Layers are imported when used. A star imports every public name and nothing else, also those
    that are imported late. No import or construction starts a backend, or changes the encoder of
    JSON. What is not there is said.
    """
    error = imported["errors"].get(stage, "")
    if stage == "an unknown name":
        assert error == "AttributeError: module 'eqattn' has no attribute 'layers'"
    elif stage == "devices":  # The stages before went through, although asking for devices fails.
        assert "no_such_platform" in error
    elif stage == "no matplotlib":
        assert error.endswith("python -m pip install -e '.[viz]'.")
    else:
        assert error == ""


@pytest.mark.parametrize("name", FORBIDDEN)
def test_loads_nothing_heavy(imported, name):
    assert not [m for m in imported["added"] if m == name or m.startswith(name + ".")]


def test_loads_little_beyond_equinox(imported):
    added = imported["added"]
    others = [m for m in added if m.partition(".")[0] != "eqattn"]
    assert len(added) <= 65, added
    assert len(others) <= 10, others
    assert not [
        m for m in others if m.partition(".")[0] not in sys.stdlib_module_names | {"jax", "numpy"}
    ]


def test_public_names_are_there_and_are_documented():
    public = {n: getattr(eqattn, n) for n in dir(eqattn) if n[0] != "_"}
    names = [n for n, x in public.items() if "eqattn" in getattr(x, "__module__", n)]
    assert {"attention", "Carry", "Blockwise", "Dense", "dropout_mask", "save"} <= set(names)
    for name in names:
        assert getattr(eqattn, name).__doc__, name


def test_type_checkers_see_the_names_that_are_imported_late():
    tree = ast.parse(pathlib.Path(eqattn.__file__).read_text())
    block = next(n for n in tree.body if isinstance(n, ast.If))
    seen = {
        alias.asname: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    assert seen == eqattn._MODULE_OF
    for name, module in seen.items():
        home = importlib.import_module(f"eqattn.{module}")
        assert getattr(eqattn, name) is getattr(home, name)
