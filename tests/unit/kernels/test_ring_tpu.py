"""What TPUs would send and hold in a ring, and when, as their own compiler schedules it. No TPU is
needed: every case is compiled for a named topology, in a process of its own.
"""

import dataclasses
from pathlib import Path

import pytest
from _ring_moves import check, reported
from _tpu_schedule import Case, Schedule


SCRIPT = Path(__file__).parent / "_tpu_schedule.py"
# Of n = 16 and 512 tokens on each device; without a window, all of them.
HOPS = {("Contiguous", 2100): 5, ("Zigzag", 2100): 15, ("Zigzag", 700): 6}
LONG = dict(layout="Zigzag", heads=32, kv_heads=8, dim=128)
CASES = {
    "zigzag": Case(layout="Zigzag", small=True),
    "eight": Case("v5e:2x4", layout="Zigzag", small=True),
    "dp-ring-tp": Case("v5e:2x4", layout="Zigzag", dp=2, tp=2, small=True),
}
SLOW = {
    "xla-forward": Case("v5e:2x4", layout="Zigzag", gradient=False, platform="xla"),
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
    return reported(SCRIPT, cases)


@pytest.fixture(scope="module")
def reports():
    return compiled(CASES)


@pytest.fixture(scope="module")
def slow_reports():
    return compiled(SLOW)


@pytest.mark.parametrize("name", CASES)
def test_schedule(reports, name):
    check(CASES[name], reports[name], HOPS)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more_schedules(slow_reports, name):
    check(SLOW[name], slow_reports[name], HOPS)


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
