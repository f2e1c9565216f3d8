"""The tour of masks and scores says what disagrees, and what it cannot do."""

import custom_mask_and_score as example
import pytest
from _programs import refuses


@pytest.mark.parametrize(
    "wrong",
    [
        dict(visible=lambda at: at[3] < at[2]),
        dict(worth=lambda learned, logits, at: logits * 1.001),
    ],
)
def test_disagreement_is_a_failure(wrong, monkeypatch, capsys):
    case = example.cases(16)[0]._replace(**wrong)
    monkeypatch.setattr(example, "cases", lambda t: [case])
    assert example.main(["--tokens", "16"]) == 1
    assert capsys.readouterr().out.endswith("some disagree\n")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--tokens 15", "--tokens must be at least 16, got 15"),
        ("--tokens few", "invalid int value"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    refuses(example.main, arguments.split(), message, capsys)
