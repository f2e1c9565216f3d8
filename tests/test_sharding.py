"""Sharded arrays and `shard_map`, on eight virtual devices (a process of its own)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


CASES = [
    "automatic_mesh", "automatic_mesh_with_lengths", "explicit_mesh", "explicit_mesh_eager",
    "explicit_mesh_vmap", "explicit_mesh_all_outputs", "shard_map_checked", "shard_map_unchecked",
    "shard_map_partly_manual", "shard_map_replicated_parameter",
]  # fmt: skip


@pytest.fixture(scope="module")
def report():
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
    }
    script = Path(__file__).parent / "_sharding_cases.py"
    result = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr
    return dict(line.split(": ", 1) for line in result.stdout.splitlines())


@pytest.mark.parametrize("case", CASES)
def test_sharded(report, case):
    assert report[case] == "ok"


def test_every_case_is_listed(report):
    assert sorted(report) == sorted(CASES)
