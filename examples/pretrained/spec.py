"""What decoders of the published families differ in, as plain values."""

import dataclasses

import equinox as eqx

from eqattn.nn import Rotary


@dataclasses.dataclass(frozen=True)
class Layer:
    """What one layer may have of its own."""

    window: int | None = None  # how many keys before its own a query sees
    rotary: Rotary | None = None
    experts: bool = False


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Experts, of which a router chooses some for each token."""

    count: int
    chosen: int
    hidden: int
    shared: int = 0  # the hidden size of one more, which every token passes
    grouped: tuple[int, int] | None = None  # (groups, those chosen), and scores by a sigmoid
    normalised: bool = True
    scale: float = 1.0
    clamp: tuple[float, float] | None = None  # (alpha, limit) of gpt-oss, which also has biases


@dataclasses.dataclass(frozen=True)
class Latent:
    """The sizes of multi-head latent attention, and whether its projections have biases."""

    query_rank: int | None
    rank: int
    rotary_dim: int
    plain_dim: int
    value_dim: int
    bias: bool


@dataclasses.dataclass(frozen=True)
class Spec:
    """A decoder, whatever its family."""

    vocabulary: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: tuple[Layer, ...]
    eps: float
    norms: str = "before"  # or "after", or "both": of each of attention and MLP
    norm: type = eqx.nn.RMSNorm
    activation: str = "silu"
    gated: bool = True
    qk_norm: str | None = None  # of each "head", or of the whole "width"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    scale: float | None = None
    soft_cap: float | None = None
    sinks: bool = False
    final_cap: float | None = None
    embedding_scale: float = 1.0
    tied: bool = False
    learned_positions: int = 0
    mixture: Mixture | None = None
    latent: Latent | None = None
