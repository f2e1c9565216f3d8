"""The cases that are measured, and the figures that are the aim."""

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any


HEADS, DIM = 8, 64
PEERS = ("jax.nn", "torch", "ejkernel", "tokamax")


@dataclasses.dataclass(frozen=True)
class Target:
    """An aim for a figure: a limit, and a harder one, `stretch`. Both are upper bounds, or lower
    bounds with `at_least`.
    """

    limit: float
    stretch: float | None = None
    at_least: bool = False

    def verdict(self, value: float) -> str:
        """`"pass"`, `"pass, stretch"` or `"miss"`."""
        sign = -1 if self.at_least else 1
        if not sign * value <= sign * self.limit:
            return "miss"
        stretched = self.stretch is not None and sign * value <= sign * self.stretch
        return "pass, stretch" if stretched else "pass"

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.limit:.3g}"


@dataclasses.dataclass
class Row:
    """One figure of a case: its value and `[lower, upper]` quartiles for each library, and its
    target. `note` says what a reader should know, such as libraries whose results are wrong.
    """

    case: str
    figure: str
    values: dict[str, float]
    quartiles: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    target: Target | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.target is None or "eqattn" not in self.values:
            return ""
        return self.target.verdict(self.values["eqattn"])

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"verdict": self.verdict}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Row":
        target = data["target"] and Target(**data["target"])
        fields = {k: v for k, v in data.items() if k not in ("verdict", "target")}
        return cls(**fields, target=target)


@dataclasses.dataclass(frozen=True)
class Case:
    """One experiment. It has 8 query heads and head dim 64, except for decoding, whose sizes are in
    `decode`.

    **Arguments:**

    - `kind`: the name of the experiment in `measure`, `decode`, `statistics`, `ring`, `rows`,
        `balance` or `bits`.
    - `reference`: the library whose time is the unit.
    - `mask`: `"full"`, `"causal"`, `"window"`, or `"array"` for causal pairs as an array that the
        program holds.
    - `cores`, `devices`: how many cores it runs on, and as how many virtual devices.
    - `batch`: how many batch elements there are, if the kind is `"time"`.
    - `queries`: how many queries there are, if the kind is `"time"`; 0 means as many as keys.
    - `score`: `"t5"` for the bias of T5, whose table of 32 buckets a program holds. `"bias"` for
        numbers of all pairs of each head, which are an argument of the program and have a gradient;
        or `""`.
    - `cache`: what holds the keys of a decoding step: `""` for a `KVCache`, or `"int8"`.
    - `targets`: the aims, by the name of the figure.
    """

    name: str
    kind: str = "time"
    tokens: int = 2048
    dtype: str = "float32"
    kv_heads: int = HEADS
    mask: str = "causal"
    window: int = 512
    backward: bool = False
    reference: str = "torch"
    cores: int = 1
    devices: int = 1
    batch: int = 1
    queries: int = 0
    score: str = ""
    cache: str = ""
    targets: Mapping[str, Target] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Case":
        """Makes a case of what `dataclasses.asdict` returned."""
        targets = {figure: Target(**x) for figure, x in data["targets"].items()}
        return cls(**{**data, "targets": targets})

    def row(self, figure: str, values: dict[str, float], **kwargs: Any) -> Row:
        return Row(self.name, figure, values, target=self.targets.get(figure), **kwargs)


_SCORES = ("t5", "bias")
_OF_A_CALL = ("entropy", "expectation", "mass")
"""The statistics that take the logsumexp of a call."""


def _time(name: str, limit: float | None = None, stretch: float | None = None, **kwargs) -> Case:
    """A case of time, whose name says what it is:
    `cpu-<dtype>-<mask>[-gqa][-many][-few]-<tokens>-<direction>`. Many are 64 batch elements, and
    few are 8 queries. `t5` and `bias` in the place of a mask are scores. There are targets of
    memory for 2048 causal tokens, and with a bias.
    """
    words = name.removeprefix("cpu-").split("-")
    dtype, mask, tokens, direction = (x for x in words if x not in ("gqa", "many", "few"))
    backward = direction == "grad"
    reference = kwargs.get("reference", "torch")
    targets = {} if limit is None else {f"time / {reference}": Target(limit, stretch)}
    if name in ("cpu-f32-causal-2048-fwd", "cpu-f32-causal-2048-grad"):
        targets["temp MiB"] = Target(32.0, 25.0) if backward else Target(20.0, 15.0)
    if mask == "bias" and dtype == "f32":
        targets["temp MiB"] = Target(20.0)
    return Case(
        name=name,
        tokens=int(tokens),
        dtype={"f32": "float32", "bf16": "bfloat16"}[dtype],
        kv_heads=2 if "gqa" in words else HEADS,
        mask="full" if mask in _SCORES else mask,
        score=mask if mask in _SCORES else "",
        backward=backward,
        batch=64 if "many" in words else 1,
        queries=8 if "few" in words else 0,
        targets=targets,
        **kwargs,
    )


def _decode(name: str, limit: float) -> Case:
    """A step of decoding, whose name says what it is."""
    tokens, mask, *cores = name.removeprefix("cpu-decode-").split("-", 2)
    return Case(
        name=name,
        kind="decode",
        tokens=int(tokens),
        mask=mask,
        reference="jax.nn",
        cores=2 if cores else 1,
        targets={"times faster": Target(limit, None, True)},
    )


def _cached(name: str, dtype: str = "float32", kv_heads: int = 4, cache: str = "") -> Case:
    """A step of decoding from a cache, at two capacities."""
    return Case(
        name=f"cpu-decode-cache-{name}",
        kind="cached",
        tokens=1024,
        dtype=dtype,
        kv_heads=kv_heads,
        cache=cache,
        targets={"time at 8 S / at S": Target(1.2), "temp MiB": Target(2.0)},
    )


CASES = (
    _time("cpu-f32-causal-16-fwd", 1.1, reference="jax.nn"),
    _time("cpu-f32-causal-16-grad", 1.1, reference="jax.nn"),
    _time("cpu-f32-causal-128-fwd", 1.1, reference="jax.nn"),
    _time("cpu-f32-causal-128-grad", 1.1, reference="jax.nn"),
    _time("cpu-f32-full-197-fwd", 1.1, reference="jax.nn"),  # a ViT's patches and its token
    _time("cpu-f32-full-197-grad", 1.1, reference="jax.nn"),
    *[
        _time(f"cpu-{dtype}-full-many-{tokens}-{direction}", 1.1, reference="jax.nn")
        for dtype, lengths in (("f32", (8, 16, 64, 128)), ("bf16", (16, 64)))
        for tokens in lengths
        for direction in ("fwd", "grad")
    ],
    *[
        _time(f"cpu-f32-{what}-{direction}", limit, reference="jax.nn", window=64)
        for what, limit in (
            ("full-few-1024", 1.1),
            ("window-2048", 0.08),
            ("t5-512", 1.1),
            ("bias-2048", 0.5),
            ("bias-1900", 0.5),
            ("bias-gqa-2048", 0.5),
        )
        for direction in ("fwd", "grad")
    ],
    _time("cpu-bf16-bias-2048-fwd", 0.5, reference="jax.nn"),
    _time("cpu-bf16-bias-2048-grad", 0.5, reference="jax.nn"),
    _time("cpu-f32-causal-512-fwd"),
    _time("cpu-f32-full-2048-fwd"),
    _time("cpu-f32-causal-2048-fwd", 1.3, 1.15),
    _time("cpu-f32-causal-2048-grad", 1.5, 1.3),
    _time("cpu-f32-causal-gqa-2048-fwd", 1.35, 1.2),
    _time("cpu-f32-causal-gqa-2048-grad"),
    _time("cpu-bf16-causal-2048-fwd"),
    _time("cpu-bf16-causal-2048-grad", 0.6, 0.55),
    _time("cpu-f32-causal-8192-fwd", 1.4, 1.3),
    _time("cpu-f32-window-8192-fwd", 0.16, 0.13),
    _time("cpu-f32-window-8192-grad"),
    Case("cpu-dots-full", "dots", mask="full", targets={"share of dots": Target(0.8, None, True)}),
    Case("cpu-dots-causal", "dots", targets={"share of dots": Target(0.9, None, True)}),
    Case("cpu-dropout-fwd", "dropout", targets={"time / no dropout": Target(1.6)}),
    Case(
        "cpu-scaling-causal",
        "scaling",
        targets={"exponent of time": Target(1.95), "exponent of memory": Target(1.02)},
    ),
    Case(
        "cpu-scaling-window",
        "scaling",
        mask="window",
        targets={"exponent of time": Target(1.1), "exponent of memory": Target(1.02)},
    ),
    Case(
        "cpu-compile-fwd",
        "compile",
        targets={"trace+compile / jax.nn": Target(3.0), "at 4 T / at T": Target(1.2)},
    ),
    Case(
        "cpu-compile-grad",
        "compile",
        backward=True,
        targets={"trace+compile / jax.nn": Target(4.0), "at 4 T / at T": Target(1.2)},
    ),
    Case(
        "cpu-compile-array-fwd",
        "compile",
        tokens=512,
        mask="array",
        targets={"trace+compile / jax.nn": Target(4.0), "at 4 T / at T": Target(1.6)},
    ),
    Case("cpu-compile-long-fwd", "compile", tokens=2**17, targets={"at 4 T / at T": Target(2.5)}),
    _decode("cpu-decode-1024-full", 1.0),
    _decode("cpu-decode-8192-full", 10.0),
    _decode("cpu-decode-8192-short", 50.0),
    _decode("cpu-decode-1024-full-2-cores", 1.0),
    _decode("cpu-decode-8192-full-2-cores", 10.0),
    _decode("cpu-decode-8192-short-2-cores", 50.0),
    Case(
        "cpu-decode-longer",
        "longer",
        tokens=1024,
        targets={"time at 16 S / at S": Target(1.1), "temp at 16 S / at S": Target(1.01)},
    ),
    _cached("f32"),
    _cached("bf16", "bfloat16"),
    _cached("f16", "float16"),
    _cached("mqa", kv_heads=1),
    _cached("mqa-bf16", "bfloat16", 1),
    _cached("int8", "bfloat16", cache="int8"),
    Case("cpu-decode-shared", "shared", tokens=4096),
    Case("cpu-bits", "bits", tokens=1024),
    Case(
        "cpu-ragged",
        "rows",
        kv_heads=2,
        targets={f"{name} / Blockwise": Target(1.1) for name in ("forward", "gradient")},
    ),
    Case(
        "cpu-decode-latent",
        "latent",
        tokens=8192,
        targets={"times faster": Target(3.0, None, True), "temp MiB": Target(2.0)},
    ),
    Case("cpu-reserve", "reserve", targets={"times faster": Target(10.0, None, True)}),
    Case(
        "cpu-statistics",
        "statistics",
        tokens=1024,
        targets={
            "max logits / forward": Target(1.02),
            **{
                f"{name} / forward": Target(1.0)
                for name in ("effective window", *_OF_A_CALL)
                + tuple(f"{name} of a call" for name in _OF_A_CALL)
            },
        },
    ),
    Case(
        "cpu-append",
        "append",
        tokens=512,
        targets={"time at 32 S / at S": Target(1.2), "outside of jit / inside": Target(1.2)},
    ),
    *(
        Case(
            f"cpu-selected-{direction}",
            "selected",
            tokens=131_072,
            backward=direction == "grad",
            targets={"time / all keys": Target(1 / 32)},
        )
        for direction in ("fwd", "grad")
    ),
    *(
        Case(
            f"cpu-selected-blocks{'' if heads == HEADS else '-gqa'}-{direction}",
            "selected blocks",
            tokens=4096,
            kv_heads=heads,
            backward=direction == "grad",
            targets={"time / all keys": Target(0.13)},
        )
        for heads in (HEADS, 2)
        for direction in ("fwd", "grad")
    ),
    *(
        Case(
            f"cpu-selected-by-query-{direction}",
            "selected by query",
            tokens=4096,
            backward=direction == "grad",
            targets={"time / all keys": Target(1.25), "of lists alike": Target(0.3)},
        )
        for direction in ("fwd", "grad")
    ),
    Case("cpu-top-keys", "ranking", tokens=131_072),
    Case(
        "cpu-tree",
        "tree",
        tokens=16_384,
        targets={"build ms": Target(50.0), "table ms": Target(50.0)},
    ),
    Case("cpu-ring-8192", "ring", tokens=8192, devices=8),
    Case(
        "ring-balance",
        "balance",
        tokens=4096,
        targets={
            f"balanced{which}, {n} devices": Target(1.05)
            for n in (8, 16, 32, 64, 128, 256)
            for which in ("", " for both, documents", " for both, window")
        },
    ),
    Case("import", "import", targets={"time / equinox": Target(1.1)}),
)

ACCURACY = tuple(
    Case(f"accuracy-{short}-{distribution}", "accuracy", dtype=dtype)
    for short, dtype in (("f32", "float32"), ("bf16", "bfloat16"))
    for distribution in ("normal", "logits64", "outlier-keys", "v-mean-10")
)

_QUICK = (
    "cpu-f32-causal-2048-fwd cpu-f32-causal-2048-grad cpu-f32-causal-gqa-2048-fwd "
    "cpu-bf16-causal-2048-fwd cpu-f32-window-8192-fwd cpu-dropout-fwd cpu-compile-fwd"
).split()


def choose(patterns: Sequence[str], quick: bool = False, accuracy: bool = False) -> list[Case]:
    """The cases whose name contains or globs one of the patterns (all, if there are none).

    `quick` makes every case 16 times shorter, drops its targets and, without patterns, leaves most
    out.

    **Raises:** `ValueError` for a pattern that no case matches.
    """
    cases = ACCURACY if accuracy else CASES
    for pattern in patterns:
        if not any(_matches(c.name, pattern) for c in cases):
            raise ValueError(f"no case matches {pattern!r}; --list shows their names")
    if patterns:
        cases = [c for c in cases if any(_matches(c.name, p) for p in patterns)]
    elif quick:
        cases = [c for c in cases if c.name in _QUICK or c.kind == "accuracy"]
    return [_smaller(c) for c in cases] if quick else list(cases)


def _matches(name: str, pattern: str) -> bool:
    return pattern in name or fnmatch.fnmatch(name, pattern)


def _smaller(case: Case) -> Case:
    tokens, window = max(case.tokens // 16, 16), max(case.window // 16, 1)
    name = case.name.replace(str(case.tokens), str(tokens))
    return dataclasses.replace(case, name=name, tokens=tokens, window=window, targets={})
