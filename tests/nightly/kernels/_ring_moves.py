"""What devices send in a ring, and when, as a compiler schedules it: compiled in a process of its
own, and judged.
"""

import collections
import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

from _tpu_schedule import Case

import eqattn
from eqattn import Causal, ring_plan, SlidingWindow


def reported(script: Path, cases: dict[str, Case]) -> dict[str, dict]:
    """What a script prints of each case."""
    # The flags of this process are for its own device.
    dropped = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
    environment = {name: x for name, x in os.environ.items() if name not in dropped}
    arguments = [json.dumps(dataclasses.asdict(case)) for case in cases.values()]
    command = [sys.executable, str(script), *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    return dict(zip(cases, map(json.loads, result.stdout.splitlines()), strict=True))


def check(case: Case, report: dict, hops_of: dict) -> None:
    """Bytes are the minimum and those of the plan, and every move hides behind attention.

    `hops_of`: the hops that a layout and a window leave. Others have all, one less than devices.
    """
    mask = Causal() if case.window is None else Causal() & SlidingWindow(case.window, 0)
    heads, kv_heads = (
        case.heads // case.tp,
        case.kv_heads // case.tp,
    )  # with the batch of one device
    sizes = dict(heads=heads, kv_heads=kv_heads, head_dim=case.dim, group=case.group)
    n, layout = report["n"] // case.group, getattr(eqattn, case.layout)()
    plan = ring_plan(case.tokens * report["n"], n, mask=mask, layout=layout, **sizes)
    walks = [sum(s * sign > 0 for s in plan.shifts) for sign in (1, -1)]
    hops, ways = sum(walks), sum(map(bool, walks))
    assert hops == hops_of.get((case.layout, case.window), n - 1)

    sent, names = collections.Counter(), ("dtype", "nbytes", "backward")
    for move in report["moves"]:
        sent[tuple(move[name] for name in names)] += move["times"]
    kv_heads, place = math.lcm(kv_heads, case.group), case.tokens * case.group
    numbers = case.tokens * kv_heads * case.dim
    assert sent.pop(("bf16", numbers * 2, False), 0) == 2 * hops  # keys and values
    assert sent.pop(("s32", place * 4, False), 0) == hops  # positions
    if case.platform == "xla":  # a kernel sees for itself what is not finite
        assert sent.pop(("bf16", case.tokens * case.kv_heads * 2, False)) == hops
    assert (report["kernels"] > 0) == (case.platform != "xla")
    if case.gradient:  # the first move of the forward, either way, serves the backward too
        assert sent.pop(("bf16", numbers * 2, True), 0) == 2 * (hops - ways)
        assert sent.pop(("s32", place * 4, True), 0) == hops - ways
        assert sent.pop(("f32", numbers * 4, True), 0) == 2 * hops  # their gradients
    assert not sent and not report["other_collectives"]
    assert plan.forward_bytes == hops * numbers * 4
    assert plan.backward_bytes == hops * numbers * (4 + 8)

    if case.group > 1:  # there and back, and in the backward again
        assert case.gradient and len(report["exchanges"]) == 2 * (3 + 2)
        nbytes = sum(size for _, size in report["exchanges"]) * (case.group - 1)
        assert nbytes == 2 * plan.exchange_bytes * case.group
    else:
        assert not report["exchanges"]

    if max(walks) > 3:
        assert sum(move["in_loop"] for move in report["moves"]) >= (
            (8 if case.gradient else 3) + (case.platform == "xla")
        )
    assert [move for move in report["moves"] if not move["hidden"]] == []
