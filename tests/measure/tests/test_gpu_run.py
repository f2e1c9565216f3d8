"""`python -m eqattn gpu-run`, rehearsed where there is no GPU, and what its figures become."""

import concurrent.futures
import io
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from eqattn.__main__ import main
from eqattn._tools.bench.cases import Row
from eqattn._tools.gpu_run import cases, child, cli, record
from eqattn._tools.process import End, results


DOCS = Path(__file__).parents[2] / "docs"


class Slow(io.StringIO):
    """A stream that lets other threads go on after each write, as any stream may."""

    def write(self, text):
        count = super().write(text)
        time.sleep(1e-3)
        return count


def test_threads_say_whole_lines(monkeypatch):
    stream = Slow()
    monkeypatch.setattr(sys, "stdout", stream)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: child.say(done=n), range(64)))
    lines = stream.getvalue().splitlines()
    assert sorted(json.loads(line)["done"] for line in lines) == list(range(64))


def test_a_step_is_measured(capsys):
    """Timed, judged by plain formulas, and said as rows."""
    case = cases.small(cases.choose(["decode, int8"])[0])
    job = child.Job([], [case], ["cuDNN"], [], 3, True, time.time() + 600, "")
    child.measure(case, job)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    rows = {x["row"]["figure"]: x["row"] for x in lines if "row" in x}
    assert set(rows) == {cases.STREAM, "step ms", "forward temp MiB", "error"}
    low, high = rows[cases.STREAM]["quartiles"]["eqattn"]
    assert 0 < low <= rows[cases.STREAM]["values"]["eqattn"] <= high
    assert set(rows["step ms"]["values"]) == {"eqattn"}  # jax.nn has no such cache
    assert 0 < rows["error"]["values"]["eqattn"] < 1e-2 and rows[cases.STREAM]["note"] == ""
    begun, ended = ([x[y] for x in lines if y in x] for y in ("begin", "end"))
    assert begun == ended == [f"{case.name}: {x}" for x in ("eqattn", "cuDNN", "times")]


@pytest.mark.slow
def test_rehearsed(tmp_path, capsys):
    """The whole way, in a process of its own: the conformance matrix, a call with its gradients and
    a step of decoding, timed, judged and written.
    """
    out = tmp_path / "run"
    flags = ["--case", "soft cap, 16k", "decode, int8", "--rounds", "2", "--out", str(out)]
    assert main(["gpu-run", "--rehearse", *flags]) == 0
    rows, machine = record.FILE.read(tmp_path / "run.json")
    assert machine["device"] == "cpu" and machine["rounds"] == 2 and "jax" in machine
    found = {(row.case, row.figure): row for row in rows}
    call, step = "soft cap, 16k", "decode, int8"
    assert set(found) == {
        *((cases.Case("ceiling").name, x) for x in ("product TFLOP/s", "copy TB/s")),
        *(("conformance", x) for x in ("cases in the bound", "XLA cases in the bound")),
        *((call, x) for x in (cases.FORWARD, cases.BACKWARD, "forward ms", "backward ms")),
        *((call, x) for x in cases.TEMPORARY.values()),
        *((call, x) for x in ("error", cases.BLOCK)),
        *((step, x) for x in (cases.STREAM, "step ms", "forward temp MiB", "error")),
    }
    for figure in ("cases in the bound", "XLA cases in the bound"):
        assert found["conformance", figure].verdict == "pass"
        assert found["conformance", figure].values == {"eqattn": 1.0}
    forward, error = found[call, cases.FORWARD], found[call, "error"]
    assert {"eqattn", "XLA"} <= set(forward.values) and forward.values["eqattn"] > 0
    assert all(low <= high for low, high in forward.quartiles.values())
    assert all(0 < x < 2e-2 for x in error.values.values()), error
    assert 0 < found[step, "error"].values["eqattn"] < 2e-2
    assert "WRONG" not in forward.note
    text = (tmp_path / "run.md").read_text()
    assert f"| {call} | {cases.FORWARD} |" in text and " ms |" not in text
    assert text == record.page(rows, machine)
    assert cases.FORWARD in capsys.readouterr().out


def test_without_pytest(tmp_path, monkeypatch, capsys):
    """It is told before anything runs: in a bare environment, it failed after minutes."""
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["gpu-run", "--rehearse", "--out", str(tmp_path / "x")])
    assert "gpu-run needs pytest" in capsys.readouterr().err


def test_where_there_is_no_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(SystemExit):
        main(["gpu-run", "--out", str(tmp_path / "x")])
    assert "needs an NVIDIA GPU, and jax has none here: cpu" in capsys.readouterr().err
    for flags, said in (
        (["--case", "square"], "there is no case ['square']"),
        (["--rehearse", "--record", str(DOCS)], "leave out --rehearse, --case and --peers"),
        (["--record", str(tmp_path)], "there is no"),
        (["--tests", str(tmp_path)], "has no conformance matrix"),
    ):
        with pytest.raises(SystemExit):
            main(["gpu-run", *flags])
        assert said in capsys.readouterr().err


def test_what_ends_a_process_is_left_out():
    """Another process goes on with the rest."""
    found = cli.Run(["conformance", "a", "b"], {})
    busy: set[str] = set()
    lines = [
        dict(begin="conformance"), dict(begin="x"), dict(check="x"), dict(end="x"),
        dict(begin="y"),
    ]  # fmt: skip
    for line in lines:
        found.take(line, busy)
    assert found.end(End(-9, "killed"), busy)
    assert found.skip == {"x", "y"} and "ended the process" in found.checks["y"]
    found.take(dict(done="conformance"), set())
    assert found.tasks == ["a", "b"]
    found.judge()
    assert found.rows[0].values == {"eqattn": 1.0} and found.rows[0].verdict == "miss"
    busy = {"a", "a: cuDNN"}
    assert found.end(End(-9, "killed"), busy) and "a: cuDNN" in found.skip and "a" not in found.skip
    assert found.end(End(1, "no memory"), {"a"}) and "a" in found.skip
    assert not found.end(End(1, "no device"), set())
    assert not found.end(End(0, ""), set())


MATRIX = """
import os, sys
assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"

def check(case):
    if case["name"] == "kernel 3":
        raise RuntimeError("x" * 500 + " CUDA_ERROR_MISALIGNED_ADDRESS " + "y" * 500)
    if case["name"] == "kernel 4":
        print("Check failed: CUDA_ERROR_ILLEGAL_ADDRESS\\n@ a frame", file=sys.stderr)
        sys.stderr.flush()
        os.abort()
    assert case["name"] != "target 4", "too large"
"""
CASES = """
def of_the_gpu(strength):
    return [{"name": f"kernel {i}"} for i in range(7)]

def covering(strength):
    targets = [("tpu", 1), ("blockwise", 1), ("ragged", 1)]
    more = {"transform": "jit", "dtype": "float16"}
    name = lambda i: f"target {i // 3 * 2 + i % 3 - 1}"
    return [{"name": name(i), "target": targets[i % 3], **more} for i in range(27)]

def name_of(case):
    return case["name"]
"""


def test_a_fault_is_the_failure_of_one_case(tmp_path, monkeypatch, capsys):
    """Of several processes with shares of the cases, another one goes on in place of one that ends."""
    (tmp_path / "matrix").mkdir()
    (tmp_path / "matrix" / "cases.py").write_text(CASES)
    (tmp_path / "matrix" / "test_conformance.py").write_text(MATRIX)
    code = "from eqattn._tools.gpu_run import child; child.device = lambda: dict(device='NVIDIA'); "
    monkeypatch.setattr(cli, "_CHILD", ("-c", code + "child.main()"))
    monkeypatch.setattr(cli.os, "cpu_count", lambda: 2)
    begun = []
    monkeypatch.setattr(cli, "results", lambda *x: begun.append(x[1]) or results(*x))
    fields: Any = dict(cases=[], peers=[], rounds=1, rehearsed=False, until=time.time() + 600)
    found = cli.Run([], fields | dict(tests=str(tmp_path)))
    cli.conform(found, dict(os.environ))
    assert sorted((x["part"], x["parts"]) for x in begun) == [(0, 2), (0, 2), (1, 2), (1, 2)]
    kernels = {f"kernel {i}" for i in range(7)}
    assert set(found.checks) == kernels | {f"XLA: target {i}" for i in (0, 4, 8, 12, 16)}
    wrong = {name: said for name, said in found.checks.items() if said}
    assert set(wrong) == {"kernel 3", "kernel 4", "XLA: target 4"} and found.failed == []
    assert wrong["kernel 3"].startswith("RuntimeError: xx")  # its own message, not the process's
    assert "xx ... CUDA_ERROR_MISALIGNED_ADDRESS ... yy" in wrong["kernel 3"]
    assert wrong["kernel 4"].endswith("(status -6: Check failed: CUDA_ERROR_ILLEGAL_ADDRESS)")
    ours, xla = found.rows
    assert (ours.values, str(ours.target)) == ({"eqattn": 5.0}, ">= 7")
    assert (xla.values, str(xla.target)) == ({"eqattn": 4.0}, ">= 5")
    cli.report(found)
    said = capsys.readouterr()
    assert said.err.splitlines() == [f"failed: {x}" for x in found.failures]
    assert len(found.failures) == 3 and "too large" not in said.out


def test_few_failures_are_printed(capsys):
    found = cli.Run([], {}, checks={f"case {i}": "wrong" for i in range(30)})
    found.judge()
    cli.report(found)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 21 and lines[0] == "failed: case 0: wrong"
    assert lines[-1] == "failed: 10 more"
    assert "case 29: wrong" in found.rows[0].note


def test_a_silent_process_is_killed():
    code = "import time; print('{\"a\": 1}', flush=True); time.sleep(60)"
    first, end = results(["-c", code], {}, {}, patience=1.0)
    assert first == {"a": 1} and isinstance(end, End) and end.status == -9


def test_a_process_ends_with_its_reader():
    """As when Ctrl-C reaches this process alone."""
    code = "import os, time; print('{\"a\": %d}' % os.getpid(), flush=True); time.sleep(60)"
    reader = results(["-c", code], {}, {})
    found = next(reader)
    assert isinstance(found, dict)
    reader.close()
    with pytest.raises(ProcessLookupError):
        os.kill(found["a"], 0)


def test_pairs():
    """Of each kind of mask, counted one by one."""

    def counted(seen):
        return sum(bool(seen(i, j)) for i in range(64) for j in range(64))

    sizes: Any = dict(tokens=64)
    causal = cases.Case("x", **sizes)
    assert causal.pairs() == counted(lambda i, j: j <= i)
    assert cases.Case("x", causal=False, **sizes).pairs() == 64**2
    window = cases.Case("x", window=16, **sizes)
    assert window.pairs() == counted(lambda i, j: 0 <= i - j < 16)
    parts = cases.Case("x", segments=4, **sizes)
    assert parts.pairs() == counted(lambda i, j: j <= i and i // 16 == j // 16)
    assert cases.Case("x", tokens=1, keys=64).pairs() == 64
    assert causal.operations() == 4 * 16 * 128 * causal.pairs()


def test_the_page_says_whether_it_was_measured(tmp_path):
    """And a recorded run writes what it says."""
    data = DOCS / record.DATA
    machine = record.FILE.read(data)[1] if data.exists() else None
    page, table = (DOCS / record.PAGE).read_text(), (DOCS / record.TABLE).read_text()
    first = page.split("\n\n")[1]
    assert first.startswith(record.first_words(machine))
    assert f'--8<-- "{record.TABLE}"' in page
    assert table == (record.NO_TABLE if machine is None else record.page(*record.FILE.read(data)))
    (tmp_path / "pages").mkdir()
    (tmp_path / record.PAGE).write_text(f"# GPU\n\n{record.UNMEASURED} There are\n")
    rows = [Row("a", cases.FORWARD, {"eqattn": 500.0, "cuDNN": 600.0})]
    record.write(rows, {"device": "NVIDIA H200"}, tmp_path)
    page = (tmp_path / record.PAGE).read_text()
    assert record.UNMEASURED not in page and "Measured on an NVIDIA H200 on " in page
    assert "| 500 |" in (tmp_path / record.TABLE).read_text()
    assert json.loads((tmp_path / record.DATA).read_text())["rows"]
