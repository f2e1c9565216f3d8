"""The list of mutants is up to date; `python tests/mutants.py` runs them."""

import mutants


def test_every_mutant_can_be_planted():
    """Each old text occurs once, and each new one is Python. If code has moved on, so must they."""
    chosen = mutants.mutants()
    assert mutants.check(chosen) == []
    assert len(chosen) >= 200
    assert len(set(chosen)) == len(chosen)


def test_prose_makes_no_verdict_old():
    code = 'class A:\n    x = 1\n    def f(self):\n        return "# x"\n'
    prose = (
        '"""Of the module."""\nclass A:\n    """Of the\n    # class."""\n\n    x = 1  # why\n'
        '    def f(self):\n        "Of the method."\n        # Why.\n        return "# x"\n'
    )
    assert mutants.code_of(prose) == mutants.code_of(code)
    assert mutants.code_of(code) != mutants.code_of(code.replace('"# x"', '"# y"'))
