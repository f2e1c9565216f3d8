"""The example: a trained model is converted, and nothing changes but how attention is computed."""

import pytest
import swap_strategy
from _programs import refuses


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
    refuses(swap_strategy.main, arguments.split(), message, capsys)
