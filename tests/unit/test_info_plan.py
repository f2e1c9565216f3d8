"""`info` says what runs here, and that a plan is for other devices."""

from eqattn.__main__ import main


def test_a_plan_without_a_mesh(capsys):
    assert main("info --no-compile --queries 64 --strategy ring --devices 8".split()) == 0
    text = capsys.readouterr().out
    line = next(x for x in text.splitlines() if x.strip().startswith("strategy "))
    assert "there is no mesh here, and below is the plan for one of 8 devices" in line
    assert "64 tokens on 8 devices" in text
    assert main("info --no-compile --queries 64 --strategy ring".split()) == 0
    text = capsys.readouterr().out
    assert "there is no mesh\n" in text and "plan" not in text
