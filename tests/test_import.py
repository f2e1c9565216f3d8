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
    "beartype concurrent.interpreters ejkernel hypothesis IPython jax._src.pallas "
    "jax.experimental.mosaic jax.experimental.pallas libtpu matplotlib optax pandas pytest scipy "
    "tensorflow tokamax torch tqdm triton"
).split()

PROGRAM = """
import json, sys
import equinox
before = set(sys.modules)
import eqattn
added = sorted(set(sys.modules) - before)
import jax
try:
    jax.devices()
    started = "a backend that does not exist"
except RuntimeError as error:
    started = str(error)
print(json.dumps([sorted(before), added, started]))
"""


def python(program, **env):
    env = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:eqattn", "-c", program],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def imported():
    """Under a platform that does not exist: starting any backend would raise."""
    done = python(PROGRAM, JAX_PLATFORMS="no_such_platform")
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_starts_no_backend(imported):
    """The import went through, although asking for devices fails."""
    assert "no_such_platform" in imported[2]


@pytest.mark.parametrize("name", FORBIDDEN)
def test_loads_nothing_heavy(imported, name):
    before, added, _ = imported
    assert not [m for m in added if m == name or m.startswith(name + ".")]


def test_loads_little_beyond_equinox(imported):
    added = imported[1]
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


def test_a_star_imports_every_public_name_and_nothing_else():
    """Also those that are imported late, whatever was used before."""
    done = python(
        "from eqattn import *\n"
        "import sys, eqattn, types\n"
        "own = {n for n in dir() if n[0] != '_'} - {'sys', 'types', 'eqattn'}\n"
        "public = {n for n in dir(eqattn) if n[0] != '_'}\n"
        "rooms = {n for n in public if isinstance(getattr(eqattn, n), types.ModuleType)}\n"
        "print(sorted(own ^ (public - rooms)))\n"
    )
    rooms = ["cache", "masks", "nn", "scores", "stats", "strategies"]
    assert done.stdout.strip() == str(rooms)


def test_construction_starts_no_backend():
    """Metadata, strategies, masks and scores of static values."""
    python(
        "import eqattn as e\n"
        "m = e.AttentionMetadata(softmax_scale=0.5, platform='tpu', blocksize_q=8)\n"
        "e.Blockwise(m), e.Dense(m), e.AttentionRegistry.create('blockwise', m)\n"
        "str(e.Causal() & e.SlidingWindow(3, 0) | ~e.PrefixLM(4))\n"
        "e.ScoreFn(lambda z, b, h, q, k: z)\n",
        JAX_PLATFORMS="no_such_platform",
    )
