"""eqattn as type checkers see it: complete, and right in a consumer's code and in the pages."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from _pages import blocks, PAGES

import eqattn


ROOT = Path(eqattn.__file__).parents[1]
CONSUMER = ROOT / "tests/unit/typing_consumer.py"


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


def pyright(folder, env):
    config = {"include": ["."], "extraPaths": [str(ROOT)]}
    config["reportUnnecessaryTypeIgnoreComment"] = "error"
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    return run("pyright", "--project", folder, "--pythonpath", sys.executable, env=env)


def mypy(folder, env):
    flags = "--strict", "--follow-imports=silent", "--cache-dir", folder / "cache"
    env = {**env, "MYPYPATH": str(ROOT)}
    return run("mypy", *flags, "--python-executable", sys.executable, ".", cwd=folder, env=env)


def errors(done):
    """The file and the line of each error."""
    assert done.returncode == 1, done.stdout + done.stderr
    return set(re.findall(r"(\w+\.py:\d+):.* error:", done.stdout))


def write_consumer(folder):
    """Writes the file of a consumer, with an error in each of its last two lines, and returns these
    lines.
    """
    text = CONSUMER.read_text()
    wrong = "assert_type(mask, Causal)\nCausal()  # type: ignore\n"
    (folder / "consumer.py").write_text(text + wrong)
    last = text.count("\n") + 1
    return {f"consumer.py:{n}" for n in (last, last + 1)}


def write_pages(folder):
    """Writes what the documentation shows, and a wrong name, whose line is returned."""
    written = 0
    for path in PAGES:
        # Pages show one function in several forms.
        lines = ["# pyright: reportRedeclaration=false"]
        for line, source, *_ in blocks(path):
            assert line > 0
            lines += [""] * (line - len(lines)) + source.splitlines()  # at the lines of the page
            written += 1
        (folder / f"page_{path.stem}.py").write_text("\n".join(lines))
    assert written > 100
    wrong = "import eqattn as e, jax.numpy as np\nx = np.ones((8, 4, 4))\n"
    (folder / "wrong.py").write_text(wrong + "e.attention(x, x, x).attention_outputs.vary()\n")
    return {"wrong.py:3"}


def test_a_consumer_and_the_pages(tmp_path, this_checkout):
    """A consumer's types are as it says, and its errors are errors. What the documentation writes
    passes in pyright's standard mode. Other types, errors and names are found.

    Both are checked by one process, as half of its time goes to reading JAX.
    """
    wrong = write_consumer(tmp_path) | write_pages(tmp_path)
    done = pyright(tmp_path, this_checkout)
    assert errors(done) == wrong, done.stdout


def test_a_consumer_with_mypy(tmp_path, this_checkout):
    wrong = write_consumer(tmp_path)
    done = mypy(tmp_path, this_checkout)
    assert errors(done) == wrong, done.stdout
