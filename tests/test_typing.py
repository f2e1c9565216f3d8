"""eqattn as type checkers see it: complete, right in a consumer's code, and checked at run time."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import eqattn


ROOT = Path(eqattn.__file__).parents[1]
CONSUMER = ROOT / "tests/typing/consumer.py"


@pytest.fixture
def this_checkout(tmp_path):
    """An environment whose `python` is this one, and finds eqattn here, whichever is installed."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("python", "python3"):
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        (folder / name).chmod(0o755)
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    extra = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [extra])]),
    }


def run(tool, *args, **kwargs):
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed")
    command = [sys.executable, "-m", tool, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, **kwargs)


def test_every_public_name_has_a_known_type(tmp_path, this_checkout):
    flags = "--verifytypes", "eqattn", "--ignoreexternal", "--outputjson"
    done = run("pyright", *flags, cwd=tmp_path, env=this_checkout)
    found = json.loads(done.stdout)["typeCompleteness"]
    assert Path(found["packageRootDirectory"]) == ROOT / "eqattn"
    unknown = {
        symbol["name"]: [d["message"] for d in symbol["diagnostics"]]
        for symbol in found["symbols"]
        if not symbol["isTypeKnown"] or symbol["isTypeAmbiguous"]
    }
    assert not unknown and found["completenessScore"] == 1
    assert found["exportedSymbolCounts"]["withKnownType"] > 150
    assert {"eqattn.attention", "eqattn.viz.plot_mask"} <= {s["name"] for s in found["symbols"]}


def pyright(path, folder, env):
    config = {"include": [str(path)], "extraPaths": [str(ROOT)]}
    config |= {"reportUnnecessaryTypeIgnoreComment": "error"}
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    return run("pyright", "--project", folder, "--pythonpath", sys.executable, env=env)


def mypy(path, folder, env):
    flags = "--strict", "--follow-imports=silent", "--cache-dir", folder / "cache"
    env = {**env, "MYPYPATH": str(ROOT)}
    return run("mypy", *flags, "--python-executable", sys.executable, path, cwd=folder, env=env)


@pytest.mark.parametrize("checker", [pyright, mypy])
def test_a_consumer(checker, tmp_path, this_checkout):
    """Its types are as it says, and its errors are errors; other types and errors are found."""
    done = checker(CONSUMER, tmp_path, this_checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    wrong = tmp_path / "wrong.py"
    text = CONSUMER.read_text()
    wrong.write_text(text + "assert_type(mask, Causal)\nCausal()  # type: ignore\n")
    done = checker(wrong, tmp_path, this_checkout)
    last = text.count("\n") + 1
    found = {line for line in (last, last + 1) if f"wrong.py:{line}:" in done.stdout}
    assert done.returncode == 1 and found == {last, last + 1}, done.stdout


HOOK = """
import jax.numpy as jnp
from jaxtyping import install_import_hook, TypeCheckError

with install_import_hook("eqattn", "beartype.beartype"):
    import eqattn

q, k = jnp.ones((2, 8, 4, 16)), jnp.ones((2, 8, 2, 16))
assert eqattn.ring_attention(q, k, k).shape == q.shape
for name, args in dict(
    value=(q, k, k[:, :-1]),  # fewer values than keys
    key=(q, k[..., :-1], k),  # another head dim than the query's
    query=(q.astype(int), k, k),
    q_segment_ids=(q, k, k, jnp.ones((2, 8))),
).items():
    try:
        eqattn.ring_attention(*args)
    except TypeCheckError as error:
        assert f"typechecking parameter '{name}'" in str(error), error
    else:
        raise AssertionError(name)
"""


def test_shapes_are_checked_under_the_hook(tmp_path, this_checkout):
    env = {**this_checkout, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", HOOK], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
