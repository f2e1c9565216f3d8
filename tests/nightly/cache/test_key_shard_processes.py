"""A cache over two processes gives the outputs of one device."""

import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import process
from ring_training import free_port


ROOT = pathlib.Path(__file__).parents[3]
DEADLINE = 120.0


def test_as_one_device(tmp_path, x64):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    flags = "--xla_force_host_platform_device_count=2"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": path}
    port, out = free_port(), tmp_path / "outputs.npz"
    logs = [tmp_path / f"{rank}.txt" for rank in range(2)]
    children = [
        subprocess.Popen(
            [sys.executable, process.__file__, *map(str, (rank, 2, port, out))],
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
    found = np.load(out)
    for got, want, (_, counts) in zip(found.values(), process.one_device(), process.STEPS):
        for row, count in enumerate(counts):
            np.testing.assert_allclose(got[row, :count], want[row, :count], rtol=0, atol=1e-13)
