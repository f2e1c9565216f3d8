"""Some calls of the fuzzer of the compiler of TPUs. `python tests/nightly/fuzz/compile.py` runs others."""

import pytest
from measure.tpu_report.chips import CHIPS

from fuzz.compile import failures


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("seed", range(3))
def test_drawn_calls_compile(seed, chip):
    pytest.importorskip("libtpu", reason="libtpu, which compiles for TPUs, is not installed")
    assert failures(chip, seed, range(25)) == []
