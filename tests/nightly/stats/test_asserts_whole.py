"""Python with `-O` leaves asserts out."""

import test_asserts as unit


def test_statistics_of_a_known_logsumexp_without_asserts():
    unit.test_statistics_of_a_known_logsumexp_without_asserts("-O")
