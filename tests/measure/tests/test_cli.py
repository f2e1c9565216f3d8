"""The command line of the lab, `bench` and the lists of `tpu-report`."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from _programs import refuses
from measure.__main__ import main
from measure.bench import accuracy, cases, cli, peers, report, timing
from measure.bench.measure import _wrong, measure
from measure.process import TESTS
from measure.tpu_report import cli as tpu_report


@pytest.mark.parametrize(
    "words, message",
    [
        ("", "command"),
        ("bench --only nothing-like-it", "nothing-like-it"),
        ("bench --peers xformers", "xformers"),
        ("bench --rounds 0", "--rounds"),
        ("gpu-run --rounds 0", "--rounds"),
        ("gpu-run --minutes -1", "--minutes"),
        ("bench --out .", "names no file"),
        ("bench --core 100000", "--core"),
        ("bench --out /no/such/folder/x", "/no/such/folder"),
        ("bench --markdown /no/such/folder/x", "/no/such/folder"),
        ("tpu-report --kernel backward-of-it", "backward-of-it"),
        ("tpu-report --chip v9", "v9"),
        ("tpu-report --json /no/such/folder/x", "/no/such/folder"),
        ("gpu-report --json /no/such/folder/x", "/no/such/folder"),
        ("triton-report --chip a100 --json /no/such/folder/x", "/no/such/folder"),
        ("gpu-run --out /no/such/folder/x", "/no/such/folder"),
        ("train", "train"),
    ],
)
def test_bad_arguments(words, message, capsys):
    refuses(main, words.split(), message, capsys)


def test_a_file_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    """It is refused before anything is measured. The superuser may write everywhere."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    refuses(main, ["bench", "--out", str(tmp_path / "x")], "cannot be written", capsys)


def test_bench(tmp_path):
    """In a process of its own, as its children are, and without other libraries than JAX."""
    out, page = tmp_path / "figures", tmp_path / "figures.md"
    command = [sys.executable, str(TESTS / "measure"), "bench", "--quick", "--rounds", "1"]
    command += ["--only", "cpu-f32-causal-512-fwd", "cpu-dropout-fwd", "*-1024-full-2-cores"]
    command += ["cpu-append", "--peers", "jax.nn"]
    command += ["--out", str(out), "--markdown", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "figures.json").read_text())
    assert data["machine"]["rounds"] == 1
    rows = {(r["case"], r["figure"]): r["values"] for r in data["rows"]}
    time = rows["cpu-f32-causal-32-fwd", "time / jax.nn"]
    assert time["jax.nn"] == 1 and time["eqattn"] > 0
    assert rows["cpu-f32-causal-32-fwd", "temp MiB"]["eqattn"] > 0
    assert rows["cpu-dropout-fwd", "time / no dropout"]["eqattn"] > 0
    step = rows["cpu-decode-64-full-2-cores", "times faster"]
    assert step["jax.nn"] == 1 and step["eqattn"] > 0
    assert rows["cpu-append", "time at 32 S / at S"]["eqattn"] > 0
    assert not any("WRONG" in r["note"] for r in data["rows"])
    for name, _ in rows:
        assert name in done.stdout and name in page.read_text()
    assert "| time / jax.nn |" in page.read_text() and "time ms" not in page.read_text()
    pytest.importorskip("matplotlib")
    assert (tmp_path / "figures.png").stat().st_size > 0


@pytest.mark.parametrize("name", ["full-few-1024-grad", "window-2048-fwd", "t5-512-fwd"])
def test_libraries_compute_the_same(name):
    """A case with few queries has as many outputs, and each library the same window and bias."""
    (case,) = cases.choose([f"cpu-f32-{name}"], quick=True)
    inputs = peers.draw(case)
    programs = {x: peers.program(x, case, inputs) for x in ("eqattn", "jax.nn")}
    assert programs["eqattn"].call()[0].shape[1] == (case.queries or case.tokens)
    assert _wrong(case, programs) == []


def test_the_work_of_a_ring():
    (case,) = cases.choose(["cpu-ring"])
    assert case.devices == jax.device_count() == 8
    rows = measure(dataclasses.replace(case, tokens=64), 3, [])
    found = {row.figure: row.values["eqattn"] for row in rows}
    assert set(found) == {"zigzag / blockwise", "contiguous / blockwise"}
    assert all(0 < x < math.inf for x in found.values())


def test_a_failing_case_is_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "choose", lambda *_: [cases.Case("broken", "no such kind")])
    assert main(["bench", "--peers", "--out", str(tmp_path / "x")]) == 1
    assert "broken: status 1: KeyError" in capsys.readouterr().err


def test_tpu_report_lists_its_kernels_and_keeps_what_is_recorded(tmp_path, monkeypatch, capsys):
    assert main(["tpu-report", "--list", "--kernel", "forward*", "--peers"]) == 0
    assert "forward, soft cap\n" in capsys.readouterr().out
    path = tmp_path / "x.json"
    path.write_text('{"versions": {"jax": "0.1", "libtpu": "0.2"}, "rows": []}')
    monkeypatch.setattr(tpu_report, "versions", lambda: {"jax": "0.1", "libtpu": "0.3"})
    with pytest.raises(SystemExit):
        main(["tpu-report", "--json", str(path)])
    assert "recorded with {'jax': '0.1', 'libtpu': '0.2'}" in capsys.readouterr().err


def test_list(capsys):
    assert main(["bench", "--list", "--only", "cpu-f32-causal", "*-bf16-*grad"]) == 0
    names = capsys.readouterr().out.split()
    assert "cpu-f32-causal-2048-grad" in names and "cpu-bf16-causal-2048-grad" in names
    assert "cpu-bf16-causal-2048-fwd" not in names
    assert main(["bench", "--list", "--accuracy"]) == 0
    assert len(capsys.readouterr().out.split()) == 8


def test_what_a_program_leaves_behind_is_its_own(monkeypatch):
    now, left = 0.0, 0.0

    def takes(seconds, leaves):
        def call():
            nonlocal now, left
            now, left = now + seconds + left, leaves

        return call

    monkeypatch.setattr(time, "process_time", lambda: now)
    times = timing.rounds_of({"lavish": takes(1.0, 0.5), "thrifty": takes(1.0, 0.0)}, 4)
    assert (times["lavish"] == 1.5).all() and (times["thrifty"] == 1).all()


def test_verdicts():
    target = cases.Target(1.3, 1.15)
    assert [target.verdict(x) for x in (1.1, 1.2, 1.4)] == ["pass, stretch", "pass", "miss"]
    share = cases.Target(0.8, None, True)
    assert [share.verdict(x) for x in (0.9, 0.7)] == ["pass", "miss"]
    assert target.verdict(math.nan) == share.verdict(math.nan) == "miss"
    row = cases.Row("a case", "time / torch", {"eqattn": 1.4, "torch": 1.0}, target=target)
    again = cases.Row.from_dict(json.loads(json.dumps(row.to_dict())))
    assert again == row and again.verdict == "miss"
    assert "0 of 1 targets met" in report.table([row])


@pytest.mark.parametrize("distribution", ["normal", "outlier-keys"])
def test_accuracy_reference(distribution, x64):
    """It has the values and gradients of JAX in float64, and units are no smaller than values."""
    case = cases.Case(f"accuracy-f64-{distribution}", "accuracy", tokens=24, dtype="float64")
    inputs = accuracy.draw(case)
    exact, units = accuracy.reference(inputs, 2.0**-53)

    def call(q, k, v):
        s = jax.numpy.einsum("bthd,bshd->bhts", q, k) / 8
        s = jax.numpy.where(np.tri(24, dtype=bool)[None, None], s, -np.inf)
        return jax.numpy.einsum("bhts,bshd->bthd", jax.nn.softmax(s, -1), v)

    q, k, v, g = (jax.numpy.asarray(x, "float64") for x in inputs)
    out, pull = jax.vjp(call, q, k, v)
    for a, x, unit in zip((out, *pull(g)), exact, units):
        assert (abs(np.asarray(a) - x) <= 1e-12 * unit + 1e-300).all()
        assert (abs(x) <= unit * (1 + 1e-12)).all()
