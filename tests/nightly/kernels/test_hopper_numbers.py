"""The tests that interpret kernels, with those for Hopper: see conftest.py. Mosaic has an interpreter in
jax 0.12 and newer.
"""

import pytest
from _kernels import drawn, how, judge, newest
from _predicates import MASKS
from matrix import oracle_masks as om
from test_functions import (  # noqa: F401
    arrays,
    called,
    shown,
    test_a_factor_behind_a_score,
    test_a_product_with_itself,
    test_learned_functions,
    test_masks_of_predicates,
    test_scores_of_predicates,
    test_scores_that_are_simplified,
    test_what_is_added_is_divided_by_the_scale,
    test_what_stops_gradients,
)
from test_kernel_caches import (  # noqa: F401
    test_a_row_is_not_a_number_as_a_whole,
    test_caches_of_any_kind,
    test_rows_that_begin_later_and_windows,
    test_what_is_not_finite_reaches_its_rows,
)
from test_listed_blocks import (  # noqa: F401
    test_gradients_that_are_sums_over_lists,
    test_lists_of_a_block_that_differ,
    test_lists_that_share_their_keys,
    test_numbers,
)
from test_lookups import (  # noqa: F401
    test_a_bias_of_t5,
    test_a_mask_and_a_score_of_a_user,
    test_lookups_of_a_ring,
    test_queries_of_the_padding_read_numbers_of_others,
    test_values_and_gradients_of_lookups,
    test_what_is_singular_where_a_mask_hides,
    test_without_rounding_of_the_table,
)
from test_numbers import (  # noqa: F401
    test_a_scale_that_is_not_positive,
    test_few_and_many_tokens,
    test_garbage_stays_where_it_is_masked,
    test_gradients_with_rows_that_see_nothing,
    test_rows_that_a_bias_hides,
    test_rows_that_a_bias_of_other_size_hides,
    test_rows_that_see_nothing_beside_full_blocks,
    test_the_hops_of_a_ring,
    test_what_is_masked_reaches_no_gradient,
    test_what_is_not_finite_reaches_the_rows_that_see_it,
    test_what_lies_behind_a_block_reaches_no_row,
)
from test_pairs import (  # noqa: F401
    test_numbers_of_pairs,
    test_the_gradient_of_a_bias,
    test_what_is_masked_reaches_no_gradient_of_a_bias,
)

from eqattn import attention, Causal, MaskFn


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
