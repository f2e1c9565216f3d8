"""Packed queries in blocks of any size, and lists of any number of heads."""

import pytest
import test_ragged_attention as unit


@pytest.mark.parametrize("block_q", [1, 3, 16])
@pytest.mark.parametrize("size", [8, 7, 64, None])
def test_rows_by_themselves(block_q, size, x64):
    unit.test_rows_by_themselves(block_q, size, x64)


@pytest.mark.parametrize("heads", [1, unit.H])
def test_each_packed_query_lists_its_keys(heads, x64):
    unit.test_each_packed_query_lists_its_keys(heads, x64)


def test_large_blocks_are_told_of_rows(x64):
    unit.test_a_mask_is_told_of_rows(16, x64)
    unit.test_a_score_is_told_of_rows(16, x64)


def test_a_row_of_a_pack_has_the_bits_that_it_has_alone():
    unit.test_a_row_of_a_pack_has_the_bits_that_it_has_alone(dict(blocksize_q=4, blocksize_k=16))
