"""Layers: attention with projections, rotary positions, and conversion from Equinox's."""

from ._convert import from_equinox as from_equinox, with_strategy as with_strategy
from ._latent import LatentAttention as LatentAttention
from ._multihead import MultiheadAttention as MultiheadAttention
from ._rotary import (
    AbstractRotaryScaling as AbstractRotaryScaling,
    LinearScaling as LinearScaling,
    Llama3Scaling as Llama3Scaling,
    NTKScaling as NTKScaling,
    Rotary as Rotary,
    rotary as rotary,
    YaRNScaling as YaRNScaling,
)
