"""What the compiler of TPUs makes of attention, for all chips, without a TPU."""

import pytest
from _tpu_compile import CASES, compile_all, expected
from measure.tpu_report.chips import CHIPS


@pytest.fixture(scope="module")
def reports():
    """Of each chip, once."""
    found: dict[str, dict] = {}
    return lambda chip: found.get(chip) or found.setdefault(chip, compile_all(chip, ()))


@pytest.mark.parametrize("chip", CHIPS)
def test_every_feature(chip, reports):
    assert set(reports(chip)) == set(CASES)
    for case, got in reports(chip).items():
        assert got.get("kernels", -1) >= expected(case), got


def test_nothing_around_the_kernels_has_a_number_for_each_pair(reports):
    assert reports("v6e")["bias, long"]["copied"] < 4096**2


def test_caches_are_read_as_they_lie(reports):
    """Of 8 rows of 65,536 tokens, a gigabyte each for keys and values, nothing is copied."""
    for case in ("long rows", "long int8", "long int8 pages"):
        got = reports("v5e")[case]
        assert got.get("kernels") == 1 and got["temporary"] <= 4 * 2**20, got
        assert got["copied"] <= 4 * 2**20, got


@pytest.mark.parametrize("chip", ["v5p", "v7x"])
def test_latents_of_8_bits_are_read_as_they_lie(chip, reports):
    """Of 8192 tokens, only their 64 features besides are copied, which XLA keeps transposed."""
    got = reports(chip)["int8 latents"]
    assert got.get("kernels") == 1 and got["temporary"] <= 1.5 * 2**20, got
    assert got["copied"] <= 8192 * 64, got


def test_caches_over_a_mesh(reports):
    """Of caches of 65,536 tokens nothing is copied, and nothing is sent."""
    for case in ("decode, mesh", "pages, mesh", "int8 pages, mesh"):
        got = reports("v5e")[case]
        assert (got.get("kernels"), got.get("collectives")) == (1, 0), got
        assert got["temporary"] <= 2**20, got
