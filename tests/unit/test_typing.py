"""eqattn as type checkers see it: complete, right in a consumer's code, and checked at run time."""

import collections.abc
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from _pages import blocks, PAGES
from jaxtyping import TypeCheckError

import eqattn
import eqattn.cache
import eqattn.stats
import eqattn.viz


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


def _types(annotation):
    """All types that an annotation names, but those of a callable's arguments."""
    args = typing.get_args(annotation)
    if isinstance(annotation, type) or not args:
        yield annotation
    elif typing.get_origin(annotation) is not collections.abc.Callable:
        for arg in args:
            yield from _types(arg)


def _functions(module):
    """The public functions of a module, and the methods of its classes, by name."""
    for name in {*dir(module), *getattr(module, "_UNLISTED", ())}:
        value = getattr(module, name)
        if name.startswith("_") or inspect.ismodule(value):
            continue
        if not inspect.isclass(value):
            yield name, value
            continue
        for attribute, method in vars(value).items():
            method = getattr(method, "__func__", getattr(method, "fget", method))
            if attribute in ("__init__", "__call__") or attribute[0] != "_":
                yield f"{name}.{attribute}", method


def test_every_array_has_a_dtype_and_a_shape():
    """No public function takes or returns `Array` without jaxtyping's `Float[Array, "t d"]`."""
    bare, shaped = [], 0
    for module in (
        eqattn,
        eqattn.masks,
        eqattn.scores,
        eqattn.cache,
        eqattn.compat,
        eqattn.nn,
        eqattn.viz,
        eqattn.stats,
    ):
        for name, function in _functions(module):
            if not inspect.isfunction(inspect.unwrap(function)):
                continue
            for argument, annotation in inspect.get_annotations(function).items():
                found = list(_types(annotation))
                bare += [f"{module.__name__}.{name}: {argument}"] * (jax.Array in found)
                assert not any(isinstance(x, str) and "Array" in x for x in found)
                shaped += any(hasattr(x, "dim_str") for x in found)
    assert not bare
    assert shaped > 200


def test_shapes_are_checked_under_the_hook(request):
    """The suite imports eqattn under jaxtyping's hook, as users may."""
    if not request.config.getoption("--jaxtyping-packages"):
        pytest.skip("without jaxtyping's hook")
    q, k = jnp.ones((2, 8, 4, 16)), jnp.ones((2, 8, 2, 16))
    assert eqattn.ring_attention(q, k, k).shape == q.shape
    for name, args in dict(
        value=(q, k, k[:, :-1]),  # fewer values than keys
        key=(q, k[..., :-1], k),  # another head dim than the query's
        query=(q.astype(int), k, k),
        q_segment_ids=(q, k, k, jnp.ones((2, 8))),
    ).items():
        with pytest.raises(TypeCheckError, match=f"typechecking parameter '{name}'"):
            eqattn.ring_attention(*args)
