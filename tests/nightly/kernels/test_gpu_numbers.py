"""Every test of tests/unit/kernels that interprets kernels, with those for GPUs: see conftest.py. Mosaic has
an interpreter in jax 0.12 and newer.
"""

import inspect

import pytest
import test_functions
import test_kernel_caches
import test_listed_blocks
import test_lookups
import test_numbers
import test_pairs
from _kernels import drawn, how, judge, newest
from _predicates import MASKS
from matrix import oracle_masks as om
from test_functions import arrays, called, shown

from eqattn import attention, Causal, MaskFn


MODULES = (
    *(test_functions, test_kernel_caches, test_listed_blocks),
    *(test_lookups, test_numbers, test_pairs),
)
for module in MODULES:
    for name, test in vars(module).items():
        if name.startswith("test_") and inspect.isfunction(test):
            if "interpreted" in inspect.signature(test).parameters:
                assert name not in globals(), f"two tests are called {name}"
                globals()[name] = test


@pytest.mark.parametrize("name", MASKS)
def test_each_mask_of_predicates(name, interpreted):
    given, ct = arrays(interpreted)
    mask = MaskFn(MASKS[name])
    judge(called("interpret", interpreted, mask=mask), given, ct, mask=shown(MASKS[name]))


@newest
@pytest.mark.parametrize("dims", [(256, 256), (192, 128)], ids=str)
def test_large_sizes(dims):
    """Of which sums take several kernels, and tiles of keys are smaller."""
    given, ct = drawn("cuda", 70, 130, 2, 1, *dims)
    strategy = how("cuda", blocksize_q=64, blocksize_k=64)
    run = lambda q, k, v: attention(q, k, v, strategy, mask=Causal()).attention_outputs
    judge(run, given, ct, mask=om.causal(70, 130))
