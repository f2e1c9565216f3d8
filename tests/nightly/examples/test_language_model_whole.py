"""The example program learns, also on several devices, and survives interruption exactly."""

import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import ring_training
from _programs import run, start


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
