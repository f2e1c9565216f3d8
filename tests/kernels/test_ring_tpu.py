"""What TPUs would send and hold in a ring, and when, as their own compiler schedules it. No TPU is
needed: every case is compiled for a named topology, in a process of its own.
"""

import collections
import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from _tpu_schedule import Case, Schedule

import eqattn
from eqattn import Causal, ring_plan, SlidingWindow


SCRIPT = Path(__file__).parent / "_tpu_schedule.py"
# Of n = 16 and 512 tokens on each device; without a window, all of them.
HOPS = {("Contiguous", 2100): 5, ("Zigzag", 2100): 15, ("Zigzag", 700): 6}
LONG = dict(layout="Zigzag", heads=32, kv_heads=8, dim=128)
CASES = {
    "zigzag": Case(layout="Zigzag"),
    "eight": Case("v5e:2x4", layout="Zigzag"),
    "dp-ring-tp": Case("v5e:2x4", layout="Zigzag", dp=2, tp=2),
    "xla-forward": Case("v5e:2x4", layout="Zigzag", gradient=False, platform="xla"),
}
SLOW = {
    "zigzag-forward": Case(layout="Zigzag", gradient=False),
    "dp-tp": Case("v5e:2x4", dp=2, tp=4),
    "window-forward": Case(window=2100, gradient=False),
    "v5p-forward": Case("v5p:2x2x4", gradient=False),
    "four": Case("v5e:2x2", layout="Zigzag"),
    "dp-ring-tp-16": Case("v5e:4x4", dp=2, tp=2),
    "contiguous-forward": Case(gradient=False),
    "contiguous": Case(),
    "zigzag-xla": Case(layout="Zigzag", platform="xla"),
    "window": Case(window=2100),
    "zigzag-window": Case(layout="Zigzag", window=2100),
    "zigzag-window-both-ways": Case(layout="Zigzag", window=700),
    "hybrid": Case(layout="Zigzag", group=4),
    "hybrid-contiguous": Case(group=2),
    "ulysses": Case(group=16),
    "dp-hybrid-tp": Case(layout="Zigzag", dp=2, group=2, tp=2),
    "v5p-contiguous": Case("v5p:2x2x4"),
    "v5p-zigzag": Case("v5p:2x2x4", layout="Zigzag"),
    "v5p-window": Case("v5p:2x2x4", window=2100),
    "sixteen": Case("v5e:4x4", tokens=4096, **LONG),
    "million-256": Case("v5e:16x16", tokens=4096, **LONG),
    "million-16": Case("v5e:4x4", tokens=65_536, **LONG),
}


def compiled(cases):
    pytest.importorskip("libtpu", reason="libtpu, which compiles for TPUs, is not installed")
    # The flags of this process are for its own device.
    dropped = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
    environment = {name: x for name, x in os.environ.items() if name not in dropped}
    arguments = [json.dumps(dataclasses.asdict(case)) for case in cases.values()]
    command = [sys.executable, str(SCRIPT), *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    return dict(zip(cases, map(json.loads, result.stdout.splitlines()), strict=True))


@pytest.fixture(scope="module")
def reports():
    return compiled(CASES)


@pytest.fixture(scope="module")
def slow_reports():
    return compiled(SLOW)


def check(case, report):
    """Bytes are the minimum and those of the plan, and every move hides behind attention."""
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
    assert hops == HOPS.get((case.layout, case.window), n - 1)

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


@pytest.mark.parametrize("name", CASES)
def test_schedule(reports, name):
    check(CASES[name], reports[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more_schedules(slow_reports, name):
    check(SLOW[name], slow_reports[name])


def test_memory_does_not_depend_on_the_number_of_devices(reports):
    assert reports["zigzag"]["n"] == 2 * reports["eight"]["n"] == 16
    assert reports["zigzag"]["peak"] <= 1.01 * reports["eight"]["peak"]


@pytest.mark.slow
def test_memory_of_a_million_tokens(slow_reports):
    sixteen, many, long = (slow_reports[x] for x in ("sixteen", "million-256", "million-16"))
    assert (many["n"], long["n"]) == (256, 16)
    assert many["peak"] <= 1.01 * sixteen["peak"]
    assert many["peak"] <= 0.75 * 2**30
    assert long["peak"] <= 13.2 * 2**30


PROGRAM = """HloModule jit_f, is_scheduled=true

%product (a: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  ROOT %c = f32[8,8]{1,0} convolution(%a, %a), window={size=1}, dim_labels=bf_io->bf
}

%attend (p: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %p = (s32[], f32[8,8]{1,0}) parameter(0)
  %x = f32[8,8]{1,0} get-tuple-element(%p), index=1
  %y = f32[8,8]{1,0} fusion(%x), kind=kOutput, calls=%product
  ROOT %t = (s32[], f32[8,8]{1,0}) tuple(%i, %y)
}

%below (p.1: (s32[], f32[8,8])) -> pred[] {
  %limit = s32[] constant(5)
  %p.1 = (s32[], f32[8,8]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  ROOT %lt = pred[] compare(%i.1, %limit), direction=LT
}

%hop (p.2: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %p.2 = (s32[], f32[8,8]{1,0}) parameter(0)
  %x.2 = bf16[8,8]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%p.2), index=1
  %s.2 = (bf16[8,8], bf16[8,8], u32[], u32[]) collective-permute-start(%x.2), channel_id=1
  %w.2 = (s32[], f32[8,8]{1,0}) while(%p.2), condition=%below, body=%attend
  %d.2 = bf16[8,8]{1,0} collective-permute-done(%s.2), metadata={op_name="transpose(jvp(f))"}
  %s.3 = (bf16[8,8], bf16[8,8], u32[], u32[]) collective-permute-start(%d.2), channel_id=1
  %d.3 = bf16[8,8]{1,0} collective-permute-done(%s.3)
  ROOT %t.2 = (s32[], f32[8,8]{1,0}) tuple(%i, %d.3)
}

ENTRY %main (q: f32[8,8]) -> f32[8,8] {
  %q = f32[8,8]{1,0} parameter(0)
  %zero = s32[] constant(2)
  %i = s32[] copy(%zero)
  %t.4 = (s32[], f32[8,8]{1,0}) tuple(%i, %q)
  %w.4 = (s32[], f32[8,8]{1,0}) while(%t.4), condition=%below, body=%hop
  %s.5 = (f32[8,8], f32[8,8], u32[], u32[]) collective-permute-start(%q), channel_id=1
  %e.5 = f32[8,8]{1,0} exponential(%q)
  %d.5 = f32[8,8]{1,0} collective-permute-done(%s.5)
  %r.5 = f32[8,8]{1,0} collective-permute(%q), channel_id=1, metadata={op_name="transpose(f)"}
  ROOT %g.5 = f32[8,8]{1,0} all-gather(%d.5), dimensions={0}
}
"""


def test_an_exposed_move_is_found():
    schedule = Schedule(PROGRAM)
    got = [dataclasses.astuple(move) for move in schedule.moves]
    assert got == [
        ("bf16", 128, 3, True, True, False),
        ("bf16", 128, 3, True, False, False),
        ("f32", 256, 1, False, False, False),
        ("f32", 256, 1, False, False, True),
    ]
    assert schedule.other_collectives == ["all-gather"]
