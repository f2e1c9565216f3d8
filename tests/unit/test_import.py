"""What `import eqattn` loads and starts, in an interpreter of its own."""

import ast
import importlib
import inspect
import json
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

import eqattn


ROOT = pathlib.Path(eqattn.__file__).parents[1]
FORBIDDEN = (
    "beartype eqattn._info eqattn.viz eqattn.kernels.nvidia eqattn.kernels.tpu concurrent.interpreters ejkernel hypothesis IPython jax._src.pallas "
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
            "cache", "compat", "masks", "nn", "scores", "stats", "strategies"
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
found = {"by itself": sorted(set(sys.modules) - before), "errors": {}}
eqattn.attention, eqattn.Causal, eqattn.Blockwise
found["with names"] = sorted(set(sys.modules) - before)
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
    assert not [m for m in imported["with names"] if m == name or m.startswith(name + ".")]


def test_loads_no_more_than_where_names_are(imported):
    own = [m for m in imported["by itself"] if m.partition(".")[0] == "eqattn"]
    assert own == ["eqattn", "eqattn._misc", "eqattn._version"]


def test_names_load_little_beyond_equinox(imported):
    added = imported["with names"]
    others = [m for m in added if m.partition(".")[0] != "eqattn"]
    assert 30 <= len(added) <= 65, f"import late what few programs use, or calls alone: {added}"
    assert len(others) <= 10, others
    assert not [
        m for m in others if m.partition(".")[0] not in sys.stdlib_module_names | {"jax", "numpy"}
    ]


def test_names_may_be_asked_for_first_while_a_function_is_traced():
    program = """
        import eqattn, jax
        from jax import numpy as jnp
        q = jnp.ones((1, 4, 2, 8))
        with jax.checking_leaks():
            y = jax.jit(lambda q: eqattn.attention(q, q, q).attention_outputs)(q)
            for name in dir(eqattn):
                jax.jit(lambda x: (getattr(eqattn, name), x)[1])(q)
        assert (abs(y - q) < 1e-6).all()
        assert (abs(eqattn.attention(q, q, q).attention_outputs - q) < 1e-6).all()
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_public_names_are_there_and_are_documented():
    public = {n: getattr(eqattn, n) for n in dir(eqattn) if n[0] != "_"}
    names = [n for n, x in public.items() if "eqattn" in getattr(x, "__module__", n)]
    assert {"attention", "Carry", "Blockwise", "Dense", "Causal", "ALiBi"} <= set(names)
    for name in names:
        assert getattr(eqattn, name).__doc__, name


# Programs that come from other libraries import these from the top.
OTHERS = (
    "ragged_mha ragged_gqa ragged_mqa reference_mha reference_gqa reference_mqa RingAttn "
    "get_mha_cost_estimate ragged_flash_attention_kernel ring_attention blockwise_attn FwdParams "
    "BwdParams PartitionManager PartitionAxis RuntimeMode dot_product_attention"
).split()


def test_names_at_home_in_a_room_are_found_at_the_top_but_not_listed():
    program = """
        import sys
        import eqattn
        from eqattn import ring_plan
        assert "ring_plan" in vars(eqattn) and not {"ring_plan", "jax_nn"} & {*dir(eqattn)}
        import eqattn.compat
        assert not [m for m in sys.modules if m.startswith("eqattn.compat.")]
        eqattn.ring_attention
        assert "eqattn.compat.easydel" not in sys.modules
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr

    assert 30 <= len(eqattn._LISTED) <= 40
    for name, room in eqattn._UNLISTED.items():
        assert getattr(eqattn, name) is getattr(getattr(eqattn, room), name)
        assert name in dir(getattr(eqattn, room))
        assert name not in eqattn.__all__ and name not in dir(eqattn)
    assert {n for n, room in eqattn._UNLISTED.items() if room == "compat"} == set(OTHERS)


@pytest.mark.parametrize("name", ["save", "load"])
def test_what_is_gone_names_the_remedy(name):
    remedy = rf"^eqattn.{name} is gone: use eqx.tree_serialise_leaves .*AttentionMetadata.to_json"
    with pytest.raises(AttributeError, match=remedy):
        getattr(eqattn, name)
    assert not hasattr(eqattn, name) and name not in dir(eqattn)


def imports_of_type_checkers(package):
    """The names that type checkers see, by the module they come from, as `late_imports` has them."""
    tree = ast.parse(pathlib.Path(package.__file__).read_text())
    block = next(n for n in tree.body if isinstance(n, ast.If))
    return {
        alias.asname: "." * (node.level - 1)
        + node.module
        + ("" if alias.name == alias.asname else f":{alias.name}")
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


@pytest.mark.parametrize("room", ["", ".compat", ".masks", ".scores", ".strategies"])
def test_type_checkers_see_the_names_that_are_imported_late(room):
    package = importlib.import_module(f"eqattn{room}")
    late = inspect.unwrap(package.__getattr__ if room else eqattn._late_name)
    places = inspect.getclosurevars(late).nonlocals["modules"]
    assert imports_of_type_checkers(package) == places
    for name, place in places.items():
        module, _, there = place.partition(":")
        home = importlib.import_module(f".{module}", package.__name__)
        assert getattr(package, name) is getattr(home, there or name)
