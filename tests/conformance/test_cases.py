"""The covering array covers, holds no invalid case, and is small."""

import itertools

from .cases import AXES, covering, invalid, name_of, pairs_of, third


def test_pairwise_covers_every_valid_pair():
    cases = covering(2)
    assert all(invalid(case) is None for case in cases)
    assert len({name_of(case) for case in cases}) == len(cases) <= 400
    for a, b in itertools.combinations(AXES, 2):
        seen = {(case[a], case[b]) for case in cases}
        possible = {(x, y) for x in AXES[a] for y in AXES[b] if invalid({a: x, b: y}) is None}
        assert seen == possible, (a, b, possible - seen)


def test_third_of_the_cases_have_most_pairs():
    pairs = lambda cases: set().union(*map(pairs_of, cases))
    values = lambda cases: {x for case in cases for x in case.items()}
    assert len(pairs(third())) >= 0.75 * len(pairs(covering(2)))
    assert values(third()) == values(covering(2))


def test_generation_is_deterministic():
    assert covering.__wrapped__(2) == covering(2)
