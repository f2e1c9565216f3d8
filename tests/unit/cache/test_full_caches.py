"""Errors of a running program over several devices. An error on one of them would let the others
wait for it until XLA ends the process, so these run in a process of their own.
"""

import os
import pathlib
import subprocess
import sys

import full


ROOT = pathlib.Path(__file__).parents[3]


def checked(*ways):
    """What the process has checked in these ways, or in all."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, full.__file__, *ways], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_all_devices_raise():
    assert len(checked("compiled over keys")) == 9
