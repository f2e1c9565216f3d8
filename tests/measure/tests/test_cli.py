"""`python -m eqattn info`, `bench` and `tpu-report`."""

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
from eqattn._tools.bench import accuracy, cases, peers, report, timing
from eqattn._tools.bench.measure import _wrong, measure
from eqattn._tools.info import parse_mask
from eqattn._tools.tpu_report import cli as tpu_report

from eqattn import AttentionRegistry, Causal, ring_plan, sharding_plan, Zigzag
from eqattn.__main__ import main


def fields(text, title):
    """The names and values printed under a title."""
    _, _, rest = text.partition(f"\n{title}\n")
    lines = rest.split("\n\n")[0].splitlines()
    return dict((x[2:17].strip(), x[18:]) for x in lines)


def test_info(capsys):
    flags = "--queries 512 --heads 4 --kv-heads 2 --dim 16 --blocksize-q 128 --blocksize-k 128"
    assert main(["info", *flags.split()]) == 0
    text = capsys.readouterr().out
    assert f"jax             {jax.__version__}\n" in text and "x cpu" in text
    assert fields(text, "call")["key"] == "float32[1, 512, 2, 16]"
    runs = fields(text, "runs")
    assert (runs["strategy"], runs["method"], runs["code"]) == ("blockwise", "forward_cpu", "XLA")
    assert runs["visited"].startswith("20 of 32 blocks") and "empty ones are skipped" in text
    assert "MiB forward" in runs["temporary"] and "MiB with gradients" in runs["temporary"]
    found = fields(text, "strategies")
    assert set(found) == set(AttentionRegistry.list_implementations())
    alone = [name for name, line in found.items() if "as blockwise: there is no mesh" in line]
    assert alone == ["all_gather", "ring", "ulysses"] and "one device" not in found["ragged"]
    lowerings = fields(text, "code for blockwise")
    assert lowerings["tpu xla"] == "yes" == lowerings["tpu pallas"]
    assert "bfloat16 and float16, not float32" in lowerings["cuda pallas"]
    assert lowerings["cuda auto"].startswith("as xla: kernels have been measured on Hopper only")
    assert "no Pallas kernel" in lowerings["rocm pallas"]


def test_a_reader_that_closes_the_pipe():
    """Such as `head`: no traceback, and the status of a process that a closed pipe ended."""
    script = "python -m eqattn info --no-compile | head -1; echo ${PIPESTATUS[0]}"
    script = script.replace("python", sys.executable, 1)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=300)
    first, status = done.stdout.splitlines()
    assert first.split()[0] == "eqattn" and status in ("0", "141")  # 0: it was written at once
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


def test_an_output_that_is_closed_before_python_begins():
    script = f"{sys.executable} -m eqattn info --no-compile >&-"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "Traceback" not in done.stderr


def test_a_pipe_that_is_closed_before(monkeypatch):
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(["info", "--no-compile"]) == 141
        monkeypatch.undo()


def test_info_counts_what_the_mask_leaves(capsys):
    flags = "--queries 1024 --heads 1 --blocksize-q 64 --blocksize-k 64 --mask causal&window:63,0"
    assert main(["info", "--no-compile", *flags.split()]) == 0
    runs = fields(capsys.readouterr().out, "runs")
    assert runs["visited"].startswith(f"{16 + 15} of 256 blocks") and "temporary" not in runs
    flop = 4 * 64 * 31 * 64 * 64
    assert runs["products"].startswith(f"{flop / 1e6:.3g} MFLOP forward")


def test_info_of_nothing_and_of_too_much(capsys):
    assert main("info --no-compile --keys 0".split()) == 0
    assert "0 of 0 blocks (0.0%)" in fields(capsys.readouterr().out, "runs")["visited"]
    assert main("info --no-compile --queries 99999999999".split()) == 0
    assert "at most 2**30 queries" in fields(capsys.readouterr().out, "runs")["nothing"]


def test_info_counts_the_blocks_of_ragged(capsys):
    """One has the rows of all heads, if its keys stay in place. For many queries they do not."""
    flags = "--strategy ragged --queries 128 --keys 1024 --heads 8 --kv-heads 2 --mask none"
    assert main(["info", "--no-compile", *flags.split()]) == 0
    runs = fields(capsys.readouterr().out, "runs")
    assert runs["blocks"] == "32 queries x 128 keys"
    assert runs["grid"] == "4 x 8 blocks of all heads"
    assert runs["visited"].startswith("32 of 32 blocks")
    assert runs["products"].startswith(f"{2 * 2 * 128 * 1024 * 8 * 64 / 1e6:.3g} MFLOP")
    assert main(["info", "--no-compile", *flags.replace("128", "256").split()]) == 0
    assert fields(capsys.readouterr().out, "runs")["grid"] == "4 x 8 blocks per key head"


def test_info_has_the_blocks_of_the_kernel(capsys):
    flags = ["--no-compile", "--queries", "2048", "--platform", "pallas", "--backend", "tpu"]
    assert main(["info", *flags]) == 0
    text = capsys.readouterr().out
    assert fields(text, "runs")["code"] == "Pallas kernel"
    assert fields(text, "runs")["blocks"] == "512 queries x 512 keys"


def test_info_plans_a_ring(capsys):
    flags = "--queries 4096 --heads 8 --kv-heads 2 --dtype bfloat16 --devices 16 --layout zigzag"
    assert main(["info", "--no-compile", *flags.split()]) == 0
    plan = ring_plan(4096, 16, layout=Zigzag(), mask=Causal(), heads=8, kv_heads=2, head_dim=64)
    text = capsys.readouterr().out
    assert repr(plan) in text and plan.balance == 1
    sizes = dict(heads=8, kv_heads=2, head_dim=64)
    assert repr(sharding_plan(4096, 16, layout=Zigzag(), mask=Causal(), **sizes)) in text


def test_a_mesh_that_was_forgotten(capsys):
    """A ring without a mesh runs on one device, and says so wherever it is named."""
    assert main(["info", "--no-compile", "--strategy", "ring", "--queries", "64"]) == 0
    text, alone = capsys.readouterr().out, " on one device, as blockwise: there is no mesh"
    assert fields(text, "runs")["strategy"] == "ring" + alone
    others = fields(text, "strategies")
    for name in ("ring", "ulysses", "all_gather"):
        assert others[name].endswith(alone)
    assert not others["blockwise"].endswith(alone)


def test_info_says_why_not(capsys):
    assert main(["info", "--no-compile", "--weights", "--queries", "64"]) == 0
    text = capsys.readouterr().out
    assert "return_weights" in fields(text, "runs")["nothing"]
    assert fields(text, "strategies")["dense"].startswith("would run")
    assert main(["info", "--no-compile", "--dtype", "bfloat16", "--queries", "64"]) == 0
    kernels = fields(capsys.readouterr().out, "code for blockwise")["cuda pallas"]
    if jax.__version_info__ >= (0, 12):
        assert "forward eqattn_fold" in kernels and "query eqattn_sum_rows" in kernels
    else:
        assert "written for jax 0.12" in kernels
    assert main(["info", "--no-compile", "--platform", "pallas"]) == 0
    assert "no Pallas kernel" in fields(capsys.readouterr().out, "runs")["nothing"]


@pytest.mark.parametrize(
    "words, message",
    [
        ("", "command"),
        ("info --mask triangle", "'triangle' is not a mask"),
        ("info --mask window:-1,0", "at least 0"),
        ("info --mask chunked", "chunked:N"),
        ("info --heads 3 --kv-heads 2", "multiple"),
        ("info --heads 0", "--heads"),
        ("info --no-compile --devices 4 --keys 12", "as many keys"),
        ("info --no-compile --devices 0", "--devices must be at least 1"),
        ("info --no-compile --value-dim 0", "--value-dim must be at least 1"),
        ("info --strategy fast", "blockwise"),
        ("info --dtype int32", "floating"),
        ("info --dtype floaty", "floaty"),
        ("info --dropout 1.5", "dropout"),
        ("info --platform gpu --backend tpu", "tpu"),
        ("info --blocksize-q 0", "block"),
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
        ("gpu-report --chip a100 --json /no/such/folder/x", "/no/such/folder"),
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


def test_interrupted(monkeypatch, capsys):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("eqattn._tools.info.run", interrupt)
    assert main(["info"]) == 130 and "interrupted" in capsys.readouterr().err


def test_masks():
    t = np.arange(9)
    q, k = t[:, None], t[None]
    for text, expected in {
        "causal": k <= q,
        "causal:2": k <= q + 2,
        "window:3,1": (k >= q - 3) & (k <= q + 1),
        "causal & window:2,0,1": (k <= q) & ((k >= q - 2) | (k < 1)),
        "prefix:4": (k <= q) | (k < 4),
        "chunked:3": (k <= q) & (k // 3 == q // 3),
        "block-causal:3": k // 3 <= q // 3,
    }.items():
        mask = parse_mask(text)
        assert mask is not None
        np.testing.assert_array_equal(mask.as_array(9, 9)[0], expected)
    assert parse_mask("none") is None


def test_bench(tmp_path):
    """In a process of its own, as its children are, and without other libraries than JAX."""
    out, page = tmp_path / "figures", tmp_path / "figures.md"
    command = [sys.executable, "-m", "eqattn", "bench", "--quick", "--rounds", "1"]
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
    from eqattn._tools.bench import cli

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
