"""The conformance matrix: axes, the combinations that make no sense, and covering arrays over the
rest.

A case is a dict with one value per axis. `covering(2)` holds every valid pair of values of any two
axes, `covering(3)` every valid triple. Generation is greedy and deterministic.
"""

from __future__ import annotations

import functools
import itertools
import random

from .masks import MASKS, RARE


AXES: dict[str, tuple] = {
    "mask": tuple(name for name in MASKS if name not in RARE),
    "length": ((16, 16), (1, 1), (1, 23), (24, 0), (7, 13), (13, 7), (37, 37), (32, 48), (61, 67)),
    "transform": (
        "jit",
        "grad",
        "jvp",
        "linearize",
        "hvp",
        "vmap",
        "vmap_grad",
        "scan",
        "checkpoint",
    ),
    "block": ((1, 1), (1, 16), (5, 3), (16, 16), (16, 7), (128, 128), (1000, 16)),
    "bias": ("none", "full", "heads", "keys", "rows", "batch", "unbatched"),
    # "lookup": ALiBi as a function of a user's own, which reads the slope of its head in a table.
    # "differences": a user's own bias, which reads a table by the difference of the positions.
    "score": ("none", "alibi", "t5", "t5_causal", "both", "features", "lookup", "differences"),
    "heads": ((1, 1), (2, 2), (2, 1), (4, 2), (4, 1)),
    "dims": ((8, 8), (4, 7), (16, 8), (1, 3)),
    "dtype": ("float32", "bfloat16", "float16", "float64"),
    # Of bias, slopes, table, sinks, scale and cap; by default the bias has that of the queries and
    # the others that of sums.
    "operands": ("default", "bfloat16", "float32", "float64"),
    "sinks": ("none", "H", "Hn", "1n"),
    "lead": ((2,), (), (2, 2)),
    "cap": ("none", "float", "array"),
    "scale": ("none", "float", "array"),
    "offset": ("none", "int", "array"),
    "dropout": (0.0, 0.25),
    # (registry name, devices). Kernels, which are interpreted, have cases of their own below.
    "target": (("blockwise", 1), ("dense", 1), ("ring", 2), ("ragged", 1)),
}
# Values that only the 3-wise array has: what they add to the pairwise one is in tests/unit/ring,
# test_tpu_ragged.py, test_latent.py, test_where_keys_lie.py and the rooms of masks. "tpu",
# "tpu_ragged": the TPU's kernels under Blockwise and Ragged. "latent": Ragged, the values being part
# of the keys. "paged": Ragged, keys and values being in pages. "ragged_keys", "paged_keys": each
# device has some of the keys. "cascade...": rows share pages, and "int8", "ring_buffer": Ragged, over
# such caches; `kept.py` fills them, and test_caches.py runs some.
MORE: dict[str, tuple] = {
    "target": (
        ("tpu", 1),
        *(("ring", 4), ("ulysses", 2), ("all_gather", 2), ("tpu_ragged", 1), ("latent", 1)),
        *(("paged", 1), ("ragged_keys", 4), ("paged_keys", 4)),
        *(("cascade", 1), ("cascade_latent", 1), ("cascade_int8", 1)),
        *(("int8", 1), ("ring_buffer", 1)),
    ),
    "mask": tuple(RARE),
    # A user's own bias, which reads a table by the query and by the key.
    "score": ("table",),
}


def _in_parts_of(n: int) -> tuple:
    """The lengths whose keys are not so many equal parts."""
    return tuple((t, s) for t, s in AXES["length"] if s % n or not s)


# What takes the most time: where other values add as much, they are taken.
DEAR = {("target", ("ring", 2)), ("transform", "hvp"), ("lead", (2, 2))}


# Arrays in which each row, or each query, has an entry for each key.
PER_KEY: dict[str, tuple] = {
    "bias": ("full", "heads", "batch", "unbatched"),
    "score": ("features",),
    "mask": ("segments", "and", "dense", "array"),
}
# Keys are read for the queries of several rows at once, which have no lists, and in inference.
CASCADE = PER_KEY | {"mask": (*PER_KEY["mask"], "selected"), "dropout": (0.25,)}
BY_DIFFERENCE = "t5", "t5_causal", "both", "differences"
# What a target cannot do, as {axis: values}. Empty for those that do everything.
TARGET_LIMITS: dict[str, dict[str, tuple]] = {
    # No kernel reads operands with features, or tables by query and key in any way but by their
    # difference, which those of Ragged do not read either.
    "tpu": {
        "dtype": ("float16", "float64"),
        "operands": ("float64",),
        "score": ("features", "table"),
        "mask": ("table",),
    },
    "tpu_ragged": {
        "dtype": ("float16", "float64"),
        "operands": ("float64",),
        "score": ("features", *BY_DIFFERENCE, "table"),
        "mask": ("table",),
    },
    "latent": {"lead": ((), (2, 2))},  # what is stored has one batch axis
    # The keys of a list may lie on any device.
    "ring": {"mask": ("selected",)},
    "all_gather": {"mask": ("selected",)},
    "ulysses": {"heads": ((1, 1),), "mask": ("selected",)},  # two devices share the heads
    # Pages of 4 tokens, equally many on each device.
    "ragged_keys": {"length": _in_parts_of(4)},
    "paged_keys": {"length": _in_parts_of(16), "lead": ((), (2, 2))},
    "paged": {"length": _in_parts_of(4), "lead": ((), (2, 2))},
    "cascade": CASCADE,
    "cascade_latent": CASCADE | {"heads": ((2, 2), (4, 2))},  # a token has one latent
    "cascade_int8": CASCADE,
    # What an array holds for a key stands where that key lies. Only positions are in their order.
    "ring_buffer": PER_KEY
    | {
        "bias": (*PER_KEY["bias"], "keys"),
        "mask": (*PER_KEY["mask"], "selected"),
    },
    **{
        name: {
            "dtype": ("float32", "float64"),
            "operands": ("float64",),
            "score": ("features", "table", *by_both),
            "mask": ("table",),
        }
        for name, by_both in (("gpu", ()), ("gpu_ragged", BY_DIFFERENCE))
    },
    **{
        name: {
            "dtype": ("float64",),
            "operands": ("float64",),
            "score": ("features", "table", *by_both),
            "mask": ("table",),
        }
        for name, by_both in (("triton", ()), ("triton_ragged", BY_DIFFERENCE))
    },
}

Case = dict


def invalid(case: Case) -> str | None:
    """Why a (partial) case makes no sense, or `None`."""
    t, s = case.get("length", (None, None))
    if case.get("mask") == "tree":
        if t is not None and not 0 < t <= s:
            return "a tree's nodes are the last t keys: t <= s"
        if case.get("offset", "none") != "none":
            return "a tree's rows start at its own offset"
    if case.get("bias") == "batch" and case.get("lead") == ():
        return "no batch axis to vary over"
    if case.get("bias") == "unbatched" and case.get("lead") == ():
        return "no batch axis to leave out"
    kernel = case.get("target", ("",))[0].startswith(("tpu", "gpu", "triton"))
    in_place = case.get("target") in (("gpu_ragged", 1), ("triton_ragged", 1))
    narrow = ("bfloat16", "float16") if in_place else ("bfloat16",)
    if kernel and case.get("dtype") in narrow and case.get("transform") == "hvp":
        return "the bound does not know the rounding of the derivative of cotangent / denominator"
    far = case.get("mask") in ("tree", "selected") and case.get("score") == "differences"
    if far and case.get("target") in (("tpu", 1), ("gpu", 1), ("triton", 1)):
        return "positions do not count up, or keys are gathered"
    for axis, values in TARGET_LIMITS.get(case.get("target", ("",))[0], {}).items():
        if axis in case and case[axis] in values:
            return f"{case['target'][0]} does not support {axis}={case[axis]}"
    return None


def _axes(strength: int) -> dict[str, tuple]:
    more = MORE if strength > 2 else {}
    return {axis: values + more.get(axis, ()) for axis, values in AXES.items()}


def _groups(strength: int):
    return list(itertools.combinations(AXES, strength))


def _uncovered(strength: int) -> dict:
    """For each group of axes, the value tuples that are possible."""
    left, axes = {}, _axes(strength)
    for group in _groups(strength):
        tuples = itertools.product(*(axes[axis] for axis in group))
        left[group] = {
            values for values in tuples if invalid(dict(zip(group, values, strict=True))) is None
        }
    return left


def _complete(
    seed: Case, values: dict, left: dict, touching: dict, rng: random.Random
) -> Case | None:
    """Extend `seed` axis by axis, each time with the value that covers the most, and of equal ones
    with one that is not dear.
    """
    case = dict(seed)
    axes = [axis for axis in AXES if axis not in case]
    rng.shuffle(axes)
    for axis in axes:
        live = [g for g in touching[axis] if left[g] and all(a in case or a == axis for a in g)]
        best, best_gain = None, -1.0
        for value in values[axis]:
            case[axis] = value
            if invalid(case) is None:
                gain = sum(tuple(case[a] for a in g) in left[g] for g in live) + rng.random()
                gain -= (axis, value) in DEAR
                if gain > best_gain:
                    best, best_gain = value, gain
        if best_gain < 0:
            return None
        case[axis] = best
    return case


def _order(case: Case) -> Case:
    return {axis: case[axis] for axis in AXES}


@functools.cache
def covering(strength: int, seed: int = 23) -> tuple[Case, ...]:
    """A covering array of the given strength, greedy, the same on every machine. The seed is that of
    thirty which made the fewest pairwise cases.
    """
    rng = random.Random(seed)
    left, axes = _uncovered(strength), _axes(strength)
    touching = {axis: [g for g in left if axis in g] for axis in AXES}
    cases: list[Case] = []
    for group in sorted(left, key=lambda g: -len(left[g])):
        for values in sorted(left[group], key=repr):
            if values not in left[group]:
                continue
            start = dict(zip(group, values, strict=True))
            case = next(
                c
                for _ in range(50)
                if (c := _complete(start, axes, left, touching, rng)) is not None
            )
            cases.append(_order(case))
            for g in left:
                left[g].discard(tuple(case[a] for a in g))
    return tuple(map(_with_a_kernel, cases))


def _with_a_kernel(case: Case) -> Case:
    """A case with a lookup by query and by key in place of a table by the difference, where keys
    are gathered or positions do not count up. No kernel reads such a table there.
    """
    placed = case["mask"] in ("tree", "selected")
    placed = placed and case["target"] in (("tpu", 1), ("gpu", 1), ("triton", 1))
    far = placed and case["score"] in BY_DIFFERENCE
    return case | {"score": "lookup"} if far else case


def with_every_mask() -> tuple[Case, ...]:
    """Some cases of the pairwise array with the masks that only the 3-wise one has, and then all as they
    are.
    """
    array = covering(2)
    return (*(case | {"mask": mask} for mask in MORE["mask"] for case in array[:9]), *array)


def needs_x64(case: Case) -> bool:
    return "float64" in (case["dtype"], case["operands"])


def _on_kernels(strength: int, strategy: str, target: str, by: dict) -> list[Case]:
    """The cases of a strategy for its kernels, with other values in place of those that these cannot
    do.
    """
    found = [case for case in covering(strength) if case["target"] == (strategy, 1)]
    found = [c | {a: x.get(c[a], c[a]) for a, x in by.items()} for c in found]
    found = [_with_a_kernel(c | {"target": (target, 1)}) for c in found]
    return [c for c in found if invalid(c) is None]


@functools.cache
def interpreted_on_a_gpu(strength: int, newest: bool) -> tuple[Case, ...]:
    """Those of `of_the_gpu` that are interpreted. Mosaic has an interpreter in jax 0.12 only."""
    return tuple(x for x in of_the_gpu(strength) if newest or x["target"][0].startswith("triton"))


@functools.cache
def of_the_gpu(strength: int) -> tuple[Case, ...]:
    """The cases of `Blockwise` and `Ragged` for the kernels for NVIDIA GPUs."""
    other = {
        "dtype": {"float32": "bfloat16", "float64": "float16"},
        "operands": {"float64": "float32"},
        "score": {"features": "none", "table": "lookup"},
        "mask": {"table": "function"},
        "block": {(1000, 16): (16, 64)},  # which kernels read where they lie
    }
    # Vectors that are read where they lie are multiples of 16 numbers.
    large = {"dims": {(8, 8): (16, 16), (4, 7): (16, 32), (16, 8): (32, 16), (1, 3): (16, 16)}}
    # Those of Ragged read no table by the difference.
    near = {"t5": "none", "t5_causal": "lookup", "both": "alibi", "differences": "lookup"}
    near = {"score": other["score"] | near}
    wide = {"dtype": {"float64": "float32"}}
    return (
        *_on_kernels(strength, "blockwise", "gpu", other),
        *_on_kernels(strength, "ragged", "gpu_ragged", other | large | near),
        *_on_kernels(strength, "blockwise", "triton", other | wide),
        *_on_kernels(strength, "ragged", "triton_ragged", other | wide | near),
    )


@functools.cache
def of_the_tpu(strength: int) -> tuple[Case, ...]:
    """The cases of `Blockwise` for the kernels for TPUs."""
    other = {
        "dtype": {"float16": "bfloat16", "float64": "float32"},
        "operands": {"float64": "float32"},
        "score": {"features": "none", "table": "lookup"},
        "mask": {"table": "function"},
    }
    return tuple(_on_kernels(strength, "blockwise", "tpu", other))


@functools.cache
def on_stairs(strength: int) -> tuple[Case, ...]:
    """Cases of the kernels for TPUs in which all masked blocks lie on a causal diagonal. Too many axes
    have to agree for the arrays themselves to have any.
    """
    own = {"mask": "causal", "block": (16, 16), "offset": "none"}
    cases = []
    for n, case in enumerate(of_the_tpu(strength)):
        heads = (2, 2) if case["heads"][0] > 1 else (1, 1)
        length = ((32, 48), (32, 32))[n % 2]
        cases.append(case | own | {"heads": heads, "length": length})
    return tuple(x for x in cases if invalid(x) is None)


def _short(value) -> str:
    if isinstance(value, tuple):
        return "x".join(str(v) for v in value) or "scalar"
    return str(value)


def name_of(case: Case) -> str:
    """A test id that says what is on: `causal-16x16-grad-bias_full-...`."""
    always = ("mask", "length", "transform", "block", "heads", "dims", "dtype", "lead", "target")
    parts = [_short(case[axis]) for axis in always]
    parts += [
        f"{a}_{_short(case[a])}"
        for a in AXES
        if a not in always and case[a] not in ("none", "default", 0.0)
    ]
    return "-".join(parts)
