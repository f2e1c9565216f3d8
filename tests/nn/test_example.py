"""The example: a trained model is converted, and nothing changes but how attention is computed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "swap_strategy.py"
sys.path.insert(0, str(SCRIPT.parent))

import swap_strategy  # noqa: E402


def test_losses_agree_and_memory_shrinks():
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *"--steps 20 --context 32 --long 1024".split()],
        env=os.environ | dict(PYTHONPATH=path, JAX_PLATFORMS="cpu"),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "not converted: 100%" in done.stderr
    rows = re.findall(r"^(eq.*?)  +(\d+\.\d+) +(\d+\.\d+)$", done.stdout, re.MULTILINE)
    assert len(rows) == 4
    losses = [float(loss) for _, loss, _ in rows]
    assert max(losses) - min(losses) < 2e-6
    memory = {name: float(mib) for name, _, mib in rows}
    assert memory["eqattn, default"] < memory["eqx.nn.MultiheadAttention"] / 3
    ends = re.search(r"after 20 steps: (\S+) not converted, (\S+) converted", done.stdout)
    assert ends is not None
    stayed, converted = map(float, ends.groups())
    assert abs(stayed - converted) < 1e-4 and stayed < losses[0]
    assert done.stdout.endswith("losses agree\n")


def test_disagreement_is_a_failure(monkeypatch, capsys):
    wrong = swap_strategy.strategies

    def strategies(model):
        variants = wrong(model)
        variants["eqattn, Dense"] = swap_strategy.eqx.tree_at(
            lambda m: m.head.bias, model, model.head.bias * 1.01
        )
        return variants

    monkeypatch.setattr(swap_strategy, "strategies", strategies)
    monkeypatch.setattr(swap_strategy, "gradient_memory", lambda model, length: 0.0)
    with swap_strategy.jax.numpy_dtype_promotion("standard"):  # for optax
        assert swap_strategy.main("--steps 2 --context 8".split()) == 1
    assert capsys.readouterr().out.endswith("losses disagree\n")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--steps 1", "--steps must be at least 2"),
        ("--context 0", "--context and --long at least 1"),
        ("--context 10000000", "--context must be less than the"),
        ("--steps many", "invalid int value"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        swap_strategy.main(arguments.split())
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
