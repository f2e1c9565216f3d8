"""Statistics of attention, in memory linear in the sequence. No weights are formed."""

from ._stats import (
    effective_window as effective_window,
    entropy as entropy,
    expectation as expectation,
    mass as mass,
)
from ._top_keys import top_keys as top_keys, TopKeys as TopKeys
