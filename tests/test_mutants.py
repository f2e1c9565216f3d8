"""The list of mutants is up to date; `python tests/mutants.py` runs them."""

import mutants


def test_every_mutant_can_be_planted():
    """Each old text occurs once, and each new one is Python. If code has moved on, so must they."""
    chosen = mutants.mutants()
    assert mutants.check(chosen) == []
    assert len(chosen) >= 200
    assert len(set(chosen)) == len(chosen)
