"""When NVIDIA GPUs would send in a ring, as XLA schedules it. No GPU is needed: every case is
compiled for named chips, in a process of its own.
"""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
from _ring_moves import check, reported
from _tpu_schedule import Case, Schedule
from measure.cuda import CHIPS


SCRIPT = Path(__file__).parent / "_gpu_schedule.py"
HOPPER = Case("h200:1x1x4", platform="gpu")
OTHERS = {chip: Case(f"{chip}:1x1x4", platform="triton") for chip in CHIPS}
HIDDEN = {
    "forward": replace(HOPPER, gradient=False),
    "gradients": HOPPER,
    "window": replace(HOPPER, window=700),
    "zigzag": replace(HOPPER, topology="h200:1x1x8", layout="Zigzag"),
    "hosts": replace(HOPPER, topology="h200:1x2x4"),
    "dp-ring-tp": replace(HOPPER, topology="h200:1x1x8", dp=2, tp=2),
    "triton": OTHERS["h200"],
    "b200": OTHERS["b200"],
    "a100, told to": replace(OTHERS["a100"], hides=True),
    "rtx4090, told to": replace(OTHERS["rtx4090"], hides=True, gradient=False),
    "rtxpro6000, told to": replace(OTHERS["rtxpro6000"], hides=True, gradient=False),
}
EXPOSED = {
    "h200, told not to": replace(HOPPER, hides=False, gradient=False),
    "a100": OTHERS["a100"],
    "rtx4090": replace(OTHERS["rtx4090"], gradient=False),
    "rtxpro6000": replace(OTHERS["rtxpro6000"], gradient=False),
}
HOPS = {("Contiguous", 700): 2}


@pytest.fixture(scope="module")
def reports():
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("needs jax[cuda13]")
    return reported(SCRIPT, HIDDEN | EXPOSED)


@pytest.mark.slow
@pytest.mark.parametrize("name", HIDDEN)
def test_every_move_hides_behind_a_kernel(reports, name):
    check(HIDDEN[name], reports[name], HOPS)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPOSED)
def test_without_the_scheduler_no_move_is_hidden(reports, name):
    """So the page names the chips where a flag is needed. Once XLA hides moves there by itself, this
    fails, and the page may say less.
    """
    moves = reports[name]["moves"]
    assert moves and not any(move["hidden"] for move in moves)


PROGRAM = """HloModule jit_f, is_scheduled=true

%hop (p.2: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %p.2 = (s32[], f32[8,8]{1,0}) parameter(0)
  %x.2 = bf16[8,8]{1,0} get-tuple-element(%p.2), index=1
  %s.2 = (bf16[8,8], bf16[8,8]) collective-permute-start(%x.2), backend_config={"is_sync":false}
  %w.2 = f32[8,8]{1,0} custom-call(%x.2), custom_call_target="mosaic_gpu_v2"
  %d.2 = bf16[8,8]{1,0} collective-permute-done(%s.2)
  %s.3 = (bf16[8,8], bf16[8,8]) collective-permute-start(%x.2), backend_config={"is_sync":true}
  %w.3 = f32[8,8]{1,0} custom-call(%x.2), custom_call_target="__gpu$xla.gpu.triton"
  %d.3 = bf16[8,8]{1,0} collective-permute-done(%s.3)
  %s.4 = (bf16[8,8], bf16[8,8]) collective-permute-start(%x.2), backend_config={"is_sync":false}
  %w.4 = f32[8,8]{1,0} custom-call(%x.2), custom_call_target="cu_threefry2x32"
  %d.4 = bf16[8,8]{1,0} collective-permute-done(%s.4)
  ROOT %t.2 = (s32[], f32[8,8]{1,0}) tuple(%i, %d.3)
}

ENTRY %main (q: f32[8,8]) -> f32[8,8] {
  %t.4 = (s32[], f32[8,8]{1,0}) parameter(0)
  ROOT %w.5 = (s32[], f32[8,8]{1,0}) while(%t.4), condition=%below, body=%hop, backend_config={"known_trip_count":{"n":"5"}}
}
"""


def test_a_move_that_waits_is_found():
    schedule = Schedule(PROGRAM)
    assert [(move.times, move.hidden) for move in schedule.moves] == [
        (5, True),
        (5, False),
        (5, False),
    ]
    assert schedule.kernels == 2
