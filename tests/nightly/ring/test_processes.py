"""A ring over several processes has the loss and the gradients of one device."""

import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest
from ring import process
from ring_training import free_port


ROOT = pathlib.Path(__file__).parents[3]
DEADLINE = 120.0


@pytest.mark.parametrize("processes", [2, 4])
def test_as_one_device(processes, tmp_path):
    flags = f"--xla_force_host_platform_device_count={4 // processes}"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": path}
    port, out = free_port(), tmp_path / "gradients.npz"
    logs = [tmp_path / f"{rank}.txt" for rank in range(processes)]
    command = [sys.executable, process.__file__]
    children = [
        subprocess.Popen(
            [*command, *map(str, (rank, processes, port, out))],
            env=env,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    end = time.monotonic() + DEADLINE
    try:
        for child, log in zip(children, logs, strict=True):
            code = child.wait(timeout=max(end - time.monotonic(), 1))
            assert code == 0, log.read_text()[-3000:]
    finally:
        for child in children:
            child.kill()
    got, want = np.load(out), process.one_device()
    for name in process.NAMES:
        error = np.abs(got[name] - want[name]).max() / max(1, np.abs(want[name]).max())
        assert error <= 1e-13, (name, error)
