"""Many random functions of `test_intervals.py`."""

import jax
import pytest
from test_intervals import check_sound, fuzz


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@fuzz(1500)
def test_sound_for_many_random_functions(case, block_q, block_k, traced):
    check_sound(case, block_q, block_k, traced == 0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_sound_for_random_functions_of_64_bits():
    @fuzz(500, wide=True)
    def run(case, block_q, block_k, traced):
        check_sound(case, block_q, block_k, traced == 0)

    with jax.enable_x64(True):
        run()
