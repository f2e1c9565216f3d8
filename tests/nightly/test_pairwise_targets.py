"""The pairwise array, or each value of an axis, for what tests/matrix runs some cases of: kernels, which
are interpreted here, caches, keys that lie elsewhere, statistics and lists of keys.
"""

import jax
import pytest
from matrix import (
    of_keys,
    test_caches as caches,
    test_conformance as conformance,
    test_latent as latent,
    test_statistics as statistics,
    test_top_keys as top_keys,
    test_where_keys_lie as keys,
)
from matrix.cases import interpreted_on_a_gpu, name_of, of_the_tpu, on_stairs

from eqattn.kernels.tpu import _operands


CASES = [*of_the_tpu(2), *on_stairs(2)]
CASES += interpreted_on_a_gpu(2, newest=jax.__version_info__ >= (0, 12))
CASES += [case for axis in caches.EACH for case in caches.of_each(axis)]
CASES += [case for axis in keys.EACH for case in keys.of_each(axis)]
CASES += latent.of_each_transform().values()
CASES = {name_of(case): case for case in CASES}  # A value of two axes may have the same case.


@pytest.mark.parametrize("name", CASES)
def test_target(name):
    conformance.check(CASES[name])


@pytest.mark.parametrize("case", conformance.PLACED, ids=name_of)
def test_pairs_are_read_where_they_lie(case, monkeypatch):
    conformance.test_pairs_are_read_where_they_lie(case, monkeypatch)


@pytest.mark.parametrize(
    "case", conformance.in_place(of_the_tpu(2), ("full", "heads")), ids=name_of
)
def test_kernels_read_pairs_where_they_lie(case, monkeypatch):
    """Above, few do, as small blocks fill no registers. A bias that the heads of a group share lies
    in blocks.
    """
    found = []

    def joined(x, axes, sizes, f=_operands.joined):
        found.append(sizes)
        return f(x, axes, sizes)

    monkeypatch.setattr(_operands, "joined", joined)
    conformance.check(case | dict(lead=()))
    assert found


@pytest.mark.parametrize("case", of_keys.cases_of(2), ids=name_of)
def test_statistics(case):
    statistics.check(case)


@pytest.mark.parametrize("case", of_keys.cases_of(2, top_keys.has_lists), ids=name_of)
def test_top_keys(case):
    top_keys.check(case)
