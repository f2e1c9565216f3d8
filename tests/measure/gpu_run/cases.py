"""What is measured on a GPU, and the figures that are the aim on an H200."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..bench.cases import Row, Target


PEERS = (
    "XLA",
    "eqattn Triton",
    "cuDNN",
    "jax Mosaic",
    "jax Triton",
    "tokamax Mosaic",
    "tokamax Triton",
    "torch cuDNN",
    "torch flash",
)
"""What eqattn's kernels are compared with. `"XLA"` is the code that eqattn runs without them.
`"eqattn Triton"` is its kernel for other chips, which only decodes here.
"""


@dataclasses.dataclass(frozen=True)
class Case:
    """One experiment, in bfloat16.

    **Arguments:**

    - `batch`, `tokens`, `heads`, `kv_heads`, `dim`: the sizes of a call.
    - `keys`: the tokens in the cache of each row, in a step of decoding. With 0, a call has as many
        keys as queries, and gradients are measured too.
    - `cache`: how keys lie in it: `""` in order, `"pages"` of 128 tokens, `"int8"` or
        `"float8_e4m3fn"`.
    - `causal`, `window`, `segments`, `cap`, `dropout`: what attention does to pairs. `window` is
        its number of keys, and `segments` the number of documents of equal length.
    - `targets`: the aims, by the name of the figure.
    """

    name: str
    batch: int = 1
    tokens: int = 16_384
    heads: int = 16
    kv_heads: int = 16
    dim: int = 128
    keys: int = 0
    cache: str = ""
    causal: bool = True
    window: int | None = None
    segments: int = 0
    cap: float | None = None
    dropout: float = 0.0
    targets: Mapping[str, Target] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Case":
        """Makes a case of what `dataclasses.asdict` returned."""
        targets = {figure: Target(**x) for figure, x in data["targets"].items()}
        return cls(**{**data, "targets": targets})

    @property
    def plain(self) -> "Case":
        """The same sizes, causal and with nothing else."""
        fields: dict[str, Any] = dict(window=None, segments=0, cap=None, dropout=0.0, targets={})
        return dataclasses.replace(self, name=f"{self.name}, plain", **fields)

    @property
    def featured(self) -> bool:
        """Whether its time is compared with that of the `plain` call."""
        return bool(self.window or self.segments or self.cap or self.dropout)

    def pairs(self) -> int:
        """How many pairs of a query and a key are visible, of one head and batch element."""
        if self.keys:
            return self.keys * self.tokens
        if not self.causal:
            return self.tokens**2
        length = self.tokens // (self.segments or 1)
        seen = min(self.window or length, length)  # the most keys of a query
        return (self.segments or 1) * (seen * (seen + 1) // 2 + (length - seen) * seen)

    def operations(self) -> float:
        """The floating point operations of the two products of a forward pass. The five products of
        a backward pass take 2.5 times as many.
        """
        return 4.0 * self.batch * self.heads * self.dim * self.pairs()

    def row(self, figure: str, values: Mapping[str, float], **kwargs: Any) -> Row:
        return Row(self.name, figure, dict(values), target=self.targets.get(figure), **kwargs)


CONFORMANCE, CEILING = "conformance", "ceiling"
"""The names of what is done in addition to the cases."""

BY_XLA = "XLA: "
"""What names of conformance cases begin with that XLA code computes, in place of kernels."""

FORWARD, BACKWARD = "forward TFLOP/s", "backward TFLOP/s"
TEMPORARY = {FORWARD: "forward temp MiB", BACKWARD: "gradients temp MiB"}
BLOCK, STREAM = "time a block / plain", "TB/s"


def _rate(limit: float, stretch: float | None = None) -> Target:
    return Target(limit, stretch, at_least=True)


_GROUPED: dict[str, Any] = dict(heads=32, kv_heads=8)
_STEP: dict[str, Any] = dict(tokens=1, causal=False, **_GROUPED)
_MEMORY = {TEMPORARY[FORWARD]: Target(1.1e6 / 2**20), TEMPORARY[BACKWARD]: Target(2.2e6 / 2**20)}

CASES = (
    Case(
        "causal, 16k",
        targets={FORWARD: _rate(600.0, 645.0), BACKWARD: _rate(430.0, 540.0), **_MEMORY},
    ),
    Case(
        "decode, 64 rows",
        batch=64,
        keys=8192,
        targets={STREAM: _rate(3.4)},
        **_STEP,
    ),
    Case("full, 16k", causal=False, targets={FORWARD: _rate(640.0, 690.0)}),
    Case("causal, 1k", batch=16, tokens=1024, targets={FORWARD: _rate(380.0)}),
    Case("causal, 4k, 4 heads a key", batch=8, tokens=4096, **_GROUPED),
    Case(
        "causal, 16k, D = 64",
        heads=32,
        kv_heads=32,
        dim=64,
        targets={FORWARD: _rate(480.0), BACKWARD: _rate(330.0)},
    ),
    Case(
        "causal, 8k, D = 256",
        batch=2,
        tokens=8192,
        heads=8,
        kv_heads=8,
        dim=256,
        targets={FORWARD: _rate(620.0), BACKWARD: _rate(210.0)},
    ),
    Case("decode, a row of 128k", keys=131_072, targets={STREAM: _rate(0.7 * 3.4)}, **_STEP),
    Case("window of 1024, 16k", window=1024, targets={BLOCK: Target(1.1)}),
    Case("segments, 16k", segments=16, targets={BLOCK: Target(1.1)}),
    Case("soft cap, 16k", cap=20.0, targets={BLOCK: Target(1.1)}),
    Case("dropout, 4k", batch=4, tokens=4096, dropout=0.1, targets={BLOCK: Target(3.0)}),
    Case("decode, pages", batch=64, keys=8192, cache="pages", **_STEP),
    Case("decode, int8", batch=64, keys=8192, cache="int8", **_STEP),
    Case("decode, float8", batch=64, keys=8192, cache="float8_e4m3fn", **_STEP),
)
"""In the order of their weight: what comes last is left out where time is short."""


def small(case: Case) -> Case:
    """A case of the same kind that a CPU computes at once, without aims."""
    return dataclasses.replace(
        case,
        batch=min(case.batch, 2),
        tokens=min(case.tokens, 64),
        keys=min(case.keys, 128),
        heads=2 * case.heads // case.kv_heads,
        kv_heads=2,
        dim=case.dim // 4,
        window=case.window and 16,
        segments=min(case.segments, 2),
        targets={},
    )


def choose(names: list[str] | None) -> tuple[Case, ...]:
    """The cases of these names; None means all. **Raises:** `ValueError` for an unknown name."""
    found = {case.name: case for case in CASES}
    if unknown := [name for name in names or () if name not in found]:
        raise ValueError(f"there is no case {unknown}; there are {list(found)}")
    return CASES if names is None else tuple(found[name] for name in names)
