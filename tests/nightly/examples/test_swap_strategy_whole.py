"""The example: a trained model is converted, and nothing changes but how attention is computed."""

import re

import swap_strategy
from _programs import run


def test_losses_agree_and_memory_shrinks():
    out, err = run("swap_strategy.py", *"--steps 20 --context 32 --long 1024".split())
    assert "not converted: 100%" in err
    rows = re.findall(r"^(eq.*?)  +(\d+\.\d+) +(\d+\.\d+)$", out, re.MULTILINE)
    assert len(rows) == 4
    losses = [float(loss) for _, loss, _ in rows]
    assert max(losses) - min(losses) < 2e-6
    memory = {name: float(mib) for name, _, mib in rows}
    assert memory["eqattn, default"] < memory["eqx.nn.MultiheadAttention"] / 3
    ends = re.search(r"after 20 steps: (\S+) not converted, (\S+) converted", out)
    assert ends is not None
    stayed, converted = map(float, ends.groups())
    assert abs(stayed - converted) < 1e-4 and stayed < losses[0]
    assert out.endswith("losses agree\n")


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
