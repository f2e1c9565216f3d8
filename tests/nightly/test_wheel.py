"""What is built installs into an environment that has nothing else, and works there."""

import os
import re
import subprocess
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import eqattn


ROOT = Path(__file__).parents[2]
CALL = """
import jax.numpy as jnp, sys
from eqattn import attention, Causal, viz
x = jnp.ones((5, 2, 4))
assert jnp.allclose(attention(x, x, x, mask=Causal()).attention_outputs, 1.0)
assert "site-packages" in sys.modules["eqattn"].__file__
viz.plot_mask(Causal(), 8, 8).figure.savefig("mask.svg")
"""


def run(*command, cwd):
    env = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
    env["JAX_PLATFORMS"] = "cpu"
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True)
    if "No matching distribution found" in done.stderr or "ConnectionError" in done.stderr:
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_wheel_of_the_sdist_works_in_a_bare_environment(tmp_path):
    folder = tmp_path / "env"
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "hatchling", cwd=tmp_path)
    build = "import hatchling.build as b; b.build_{}(r'{}')"
    run(python, "-c", build.format("sdist", tmp_path), cwd=ROOT)
    (sdist,) = tmp_path.glob("eqattn-*.tar.gz")
    with tarfile.open(sdist) as file:
        file.extractall(tmp_path, filter="data")
    (source,) = (x for x in tmp_path.glob("eqattn-*") if x.is_dir())
    for name in ("README.md", "LICENSE", "docs/CITATION.cff", "examples/lora.py", "tests"):
        assert (source / name).exists(), name
    run(python, "-c", build.format("wheel", tmp_path), cwd=source)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "eqattn/py.typed" in names and wheel.stat().st_size < 1_000_000
    said = re.search(r"The wheel has ([\d.]+) MB", (ROOT / "README.md").read_text())
    assert said is not None and abs(float(said[1]) - wheel.stat().st_size / 1e6) < 0.06
    assert {name.split("/")[0] for name in names} == {
        "eqattn",
        f"{wheel.stem.split('-py3')[0]}.dist-info",
    }

    run(python, "-m", "pip", "install", "-q", f"{wheel}[viz]", cwd=tmp_path)
    run(python, "-c", CALL, cwd=tmp_path)
    assert (tmp_path / "mask.svg").stat().st_size > 1000
    assert eqattn.__version__ in run(python, "-m", "eqattn", "info", cwd=tmp_path)
    installed = run(python, "-m", "pip", "list", cwd=tmp_path).lower()
    assert not any(name in installed for name in ("torch", "optax", "beartype", "pytest"))
