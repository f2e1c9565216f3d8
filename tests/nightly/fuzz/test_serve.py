"""Some histories of the fuzzer of caches. `python tests/nightly/fuzz/serve.py` runs any number of them."""

import pytest

from fuzz.serve import case


FEW = [(10, 2), (5, 0)]  # These found errors: lists of keys in a step of one query, and in 8 bits.


@pytest.mark.parametrize("seed, index", FEW)
def test_some_histories(seed, index):
    case(seed, index, steps=1).check()


@pytest.mark.slow
@pytest.mark.parametrize("index", range(60))
def test_histories(index):
    case(2026, index).check()
