"""The example program: it learns, survives interruption exactly, and says what is wrong."""

import ast
import json
import re
import signal
from pathlib import Path

import _run
import _text
import jax
import jax.numpy as jnp
import language_model
import numpy as np
import pytest
import ring_training
from _programs import refuses, run, start


EXAMPLES = Path(__file__).parents[3] / "examples"
SCRIPT = "language_model.py"
TINY = "--quick --layers 1 --width 16 --heads 2 --context 16 --steps 150 --sample 8".split()


def checkpoint(folder: Path) -> tuple[dict, bytes]:
    """What a run has come to, without the time that it took: the loss history and the arrays."""
    header, arrays = (folder / "checkpoint.eqx").read_bytes().split(b"\n", 1)
    history = json.loads(header)["progress"]
    history.pop("seconds")
    return history, arrays


def test_quick_run_learns(tmp_path):
    out, err = run(SCRIPT, "--quick", cwd=tmp_path)
    assert "tokens/s" in err
    assert "import " in out.split("sample:")[1]
    last = out.splitlines()[-1]
    assert re.fullmatch(
        r"held-out bits per byte: .* at the start, .* at the end; .* steps in .* s", last
    )
    before, after = map(float, re.findall(r"\d\.\d{3}", last))
    assert 7.5 < before < 8.5
    assert after < 4.2
    folder = tmp_path / "runs" / "language_model"
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    history, _ = checkpoint(folder)
    assert np.mean(history["losses"][-10:]) < np.mean(history["losses"][:10]) - 2


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.stem)
def test_every_option_is_explained(path):
    tree = ast.parse(path.read_text())
    calls = [x for x in ast.walk(tree) if isinstance(x, ast.Call) and x.args]
    flags = {x.args[0].value: x for x in calls if isinstance(x.args[0], ast.Constant)}
    flags = {name: x for name, x in flags.items() if re.fullmatch(r"--[\w-]+", str(name))}
    assert [n for n, x in flags.items() if "help" not in [k.arg for k in x.keywords]] == []
    if path.name[0] != "_":
        assert "(__doc__" in path.read_text() or "description=__doc__" in path.read_text()


@pytest.mark.slow
def test_interrupted_run_resumes_bit_for_bit(tmp_path, monkeypatch):
    # The four runs compile the same programs.
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "programs"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    run(SCRIPT, *TINY, "--out", tmp_path / "whole")
    parts = tmp_path / "parts"
    process = start(SCRIPT, *TINY, "--out", parts)
    assert process.stdout is not None
    while not process.stdout.readline().startswith("step"):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGINT, err[-3000:]
    assert "stopped and saved after step" in out
    steps = len(checkpoint(parts)[0]["losses"])
    assert 0 < steps < 150
    run(SCRIPT, "--out", parts, "--resume")
    assert checkpoint(parts) == checkpoint(tmp_path / "whole")
    out, _ = run(SCRIPT, "--out", parts, "--steps", 160, "--stop-after", 155)
    assert "stopped and saved after step 155 of 160" in out
    assert checkpoint(parts)[0]["losses"][:150] == checkpoint(tmp_path / "whole")[0]["losses"]


def test_memory_does_not_grow_as_that_of_dense(capsys):
    size = "--memory-report --quick --layers 1 --width 32 --context 4096".split()
    with jax.numpy_dtype_promotion("standard"):  # optax is not strict
        assert language_model.main(size) == 0
    blockwise, dense = (
        float(re.search(rf"{name} +([\d,.]+) MiB", text)[1].replace(",", ""))
        for text in [capsys.readouterr().out]
        for name in ("blockwise", "dense")
    )
    assert blockwise < dense / 5


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--heads 3", "--width 64 is not a multiple of twice --heads 3"),
        ("--kv-heads 3", "--heads 4 is not a multiple of --kv-heads 3"),
        ("--steps 0", "argument --steps: '0' is not an integer of at least 1"),
        ("--batch many", "argument --batch: 'many' is not an integer of at least 1"),
        ("--seed -1", "argument --seed: '-1' is not an integer of at least 0"),
        ("--lr -1", "--lr -1.0 is not a positive number"),
        ("--lr nan", "--lr nan is not a positive number"),
        ("--dtype float8", "argument --dtype: invalid choice"),
        ("--strategy nothing", "No strategy has the name 'nothing'; there are ['all_gather'"),
        ("--text nowhere", "nowhere does not exist"),
        ("--text empty", "needs more text"),
        ("--out occupied", "occupied"),
        ("--resume", "--resume: there is no checkpoint"),
        ("--resume --fresh", "not allowed with argument"),
        ("--unknown 1", "unrecognized arguments"),
        ("--out foreign", "is not a checkpoint of this program"),
        ("--out damaged", "is damaged"),
        ("--out trained --layers 3", "is of a run with layers 1, not 3"),
        ("--out trained --steps 1", "is of step 2 already"),
    ],
)
def test_bad_arguments(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("occupied").touch()
    Path("text").write_bytes(bytes(range(1, 128)) * 20)
    for folder in ("foreign", "damaged", "trained"):
        Path(folder).mkdir()
    Path("foreign/checkpoint.eqx").write_bytes(b"\x93NUMPY, say")
    config = _run.Config(**_run.QUICK | dict(layers=1), text=str(Path("text").resolve())).complete()
    text, held_out = _text.split(_text.read_documents(Path("text")))
    progress = _run.Progress(language_model.digest(text, held_out), losses=[8.0, 8.0])
    for folder in ("damaged", "trained"):
        _run.save(Path(folder) / "checkpoint.eqx", config, progress, dict(too=jnp.ones(1)))
    quick = "" if "--out" in arguments else "--quick "
    refuses(language_model.main, (quick + arguments).split(), message, capsys)


def test_failed_save_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path, config = tmp_path / "checkpoint.eqx", _run.Config()
    _run.save(path, config, _run.Progress("", losses=[1.0]), jnp.arange(3))
    monkeypatch.setattr(_run.os, "fsync", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        _run.save(path, config, _run.Progress("", losses=[2.0]), jnp.zeros(3, int))
    assert _run.load(path, jnp.zeros(3, int)).tolist() == [0, 1, 2]


def test_text_is_split_by_document(tmp_path):
    for i in range(200):
        (tmp_path / f"{i}.txt").write_text(f"document {i} " * 10)
    (tmp_path / "again.txt").write_text("document 7 " * 10)
    (tmp_path / "binary").write_bytes(b"\0\1")
    (tmp_path / "latin").write_bytes(b"\xe9")
    (tmp_path / ".hidden").write_text("hidden")
    documents = _text.read_documents(tmp_path)
    assert len(documents) == 200
    train, held_out = (part.tobytes() for part in _text.split(documents))
    pieces = [set(part.split(b"\0")[1:]) for part in (train, held_out)]
    assert pieces[0] | pieces[1] == set(documents)
    assert not pieces[0] & pieces[1]
    assert 0.04 < len(held_out) / len(train + held_out) < 0.07
    one, rest = _text.split([b"a" * 95 + b"b" * 5])
    assert (one.tobytes(), rest.tobytes()) == (b"\0" + b"a" * 95, b"\0" + b"b" * 5)


@pytest.mark.slow
def test_a_ring_and_two_processes_train_like_one_device(tmp_path):
    arguments = "--quick --devices 2 --processes 2 --deadline 240 --out".split()
    out, _ = run("ring_training.py", *arguments, tmp_path)
    apart = [float(x) for x in re.findall(r"at most (\S+) from one device", out)]
    assert len(apart) == 3 and max(apart) < 1e-5
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_ring_whose_process_fails_says_so(tmp_path):
    options = ring_training.argparse.Namespace(
        context=64, steps=1, layout="none such", width=32, out=tmp_path, deadline=120
    )
    with pytest.raises(RuntimeError, match="Process . of 2 failed"):
        ring_training.launch(options, 2, 2)
