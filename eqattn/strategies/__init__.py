"""Strategies say where and in which order (query, key) pairs are visited."""

from .._problem.problem import Problem as Problem
from ._base import AttentionImpl as AttentionImpl, Support as Support
from ._fold_strategy import AbstractFoldStrategy as AbstractFoldStrategy
from ._on_device import accumulate_in_fp32 as accumulate_in_fp32, fold as fold
from .all_gather import AllGather as AllGather
from .blockwise import Blockwise as Blockwise
from .dense import Dense as Dense
from .ragged import Ragged as Ragged
from .ring import Ring as Ring
from .ulysses import Ulysses as Ulysses


AbstractExact = AbstractFoldStrategy
"""`AbstractFoldStrategy` had this name in version 0.1."""
