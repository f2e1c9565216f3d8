"""Where and in which order (query, key) pairs are visited."""

from ._base import AttentionImpl as AttentionImpl
from ._exact import AbstractFoldStrategy as AbstractFoldStrategy
from ._support import Support as Support
from .blockwise import Blockwise as Blockwise
from .dense import Dense as Dense
from .ragged import Ragged as Ragged
from .ring import Ring as Ring
from .ulysses import Ulysses as Ulysses
