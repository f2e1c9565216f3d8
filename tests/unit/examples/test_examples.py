"""The example program: what it saves, what it needs, and how it says what is wrong."""

import ast
import re
from pathlib import Path

import _run
import _text
import jax
import jax.numpy as jnp
import language_model
import pytest
from _programs import refuses


EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.stem)
def test_every_option_is_explained(path):
    tree = ast.parse(path.read_text())
    calls = [x for x in ast.walk(tree) if isinstance(x, ast.Call) and x.args]
    flags = {x.args[0].value: x for x in calls if isinstance(x.args[0], ast.Constant)}
    flags = {name: x for name, x in flags.items() if re.fullmatch(r"--[\w-]+", str(name))}
    assert [n for n, x in flags.items() if "help" not in [k.arg for k in x.keywords]] == []
    if path.name[0] != "_":
        assert "(__doc__" in path.read_text() or "description=__doc__" in path.read_text()


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
