"""Attention over some of the keys, as a Carry, and the arithmetic of a row of it."""

from .carry import Carry as Carry
from .rows import (
    change_of_origin as change_of_origin,
    finite_origin as finite_origin,
    guarded_quotient as guarded_quotient,
    logsumexp as logsumexp,
    named_output as named_output,
    online_softmax as online_softmax,
    row_mean as row_mean,
    row_sums as row_sums,
    safe_max as safe_max,
)
