"""`python tests/measure tpu-report --call`: how bytes are counted, and the budget of whole calls."""

import dataclasses
import importlib.util
from pathlib import Path

import pytest
from measure.tpu_report import cli, report, rows, traffic
from measure.tpu_report.calls import CALLS, choose
from measure.tpu_report.rows import CallRow


BUDGET = Path(__file__).parents[1] / "tpu_calls.json"
AGAIN = f"python tests/measure tpu-report --call --peers --json tests/measure/{BUDGET.name}"

PROGRAM = """HloModule jit_step, is_scheduled=true

%fused (p: f32[8]) -> f32[8] {
  ROOT %p.1 = f32[8]{0} parameter(0)
}

ENTRY %main (x: bf16[3,100]) -> f32[3,100] {
  %x.1 = bf16[3,100]{1,0:T(8,128)(2,1)} parameter(0)
  %near = f32[16]{0:T(128)S(1)} iota(), iota_dimension=0
  %copy-start = (f32[16]{0:T(128)}, f32[16]{0:T(128)S(1)}, u32[]{:S(2)}) copy-start(%near)
  %copy-done = f32[16]{0:T(128)} copy-done(%copy-start)
  %turned = bf16[3,100]{0,1:T(8,128)(2,1)} copy(%x.1), metadata={op_name="x"}
  %same = bf16[300]{0} bitcast(%turned)
  %fold.1 = (f32[3,100]{1,0:T(4,128)}, f32[16]{0:T(128)S(1)}) custom-call(%turned, %near), custom_call_target="tpu_custom_call"
  %first = f32[3,100]{1,0:T(4,128)} get-tuple-element(%fold.1), index=0
  ROOT %fusion = f32[3,100]{1,0:T(4,128)} fusion(%first, %copy-done), kind=kLoop, calls=%fused
}
"""


def test_bytes_are_counted_with_their_tiles():
    found = {m.name: m for m in traffic.moves(PROGRAM)}
    lies, turned, wide = 2 * 8 * 128, 2 * 104 * 128, 4 * 4 * 128
    want = {"near": 0, "copy-start": 4 * 128, "turned": lies + turned}
    want |= {"fold.1": turned + wide, "fusion": wide + 4 * 128 + wide}
    assert {name: m.nbytes for name, m in found.items()} == want
    assert [name for name, m in found.items() if m.kernel] == ["fold.1"]


def test_a_transpose_by_a_sparse_core_is_counted():
    """Its operands and its result, once, and not the state that passes from its start to its end. It
    lies outside of kernels. A call on v7x was said to move nothing there.
    """
    call = """
  %turn.start = ((), (), (s32[16384]{0:T(1024)}, s32[0]{0:S(2)})) custom-call-start(), async_execution_thread="sparsecore"
  %lies = bf16[3,100]{1,0:T(8,128)(2,1)} bitcast(%x.1)
  %turn.update = ((bf16[3,100]{1,0:T(8,128)(2,1)}), bf16[3,100]{0,1:T(8,128)(2,1)}, (s32[16384]{0:T(1024)}, s32[0]{0:S(2)})) custom-call-update(%turn.start, %lies), output_to_operand_aliasing={}
  %turned = bf16[3,100]{0,1:T(8,128)(2,1)} custom-call-done(%turn.update), metadata={op_name="x"}
"""
    copied = next(x for x in PROGRAM.splitlines(keepends=True) if " copy(" in x)
    sizes = lambda text: {m.name: (m.nbytes, m.kernel) for m in traffic.moves(text)}
    before, now = sizes(PROGRAM), sizes(PROGRAM.replace(copied, call[1:]))
    read, written = 2 * 8 * 128, 2 * 104 * 128
    assert before.pop("turned") == (read + written, False)
    assert (now.pop("turn.update"), now.pop("turned")) == ((read, False), (written, False))
    assert now == before


def test_what_cannot_be_counted(tmp_path):
    with pytest.raises(ValueError, match="the bytes of first are not known: it is a while"):
        traffic.moves(PROGRAM.replace("get-tuple-element(%fold.1)", "while(%fold.1)"))
    with pytest.raises(ValueError, match="left no program"):
        traffic.dumped(tmp_path)
    (tmp_path / "1-TLP-hlo.txt").write_text("small")
    (tmp_path / "2-TLP-hlo.txt").write_text(PROGRAM)
    assert traffic.dumped(tmp_path) == PROGRAM


ROW = CallRow("forward, eqattn", "v6e", 2_000_000, 1_000_000, 2**20, 100, 1.5, 0.25)


def test_tables(tmp_path):
    text = report.call_tables([ROW])
    assert text.splitlines()[-1].split() == [
        *["forward,", "eqattn", "v6e"],
        *["2", "1", "1", "1.50", "0.25", "1.75"],
    ]
    page = report.call_markdown([ROW], {"libtpu": "1"})
    assert page.startswith("libtpu 1.\n\n| call | chip |") and "| 2 | 1 | 1 |" in page
    rows.CALLS_FILE.write([ROW], {"libtpu": "1"}, tmp_path / "x.json")
    assert rows.CALLS_FILE.read(tmp_path / "x.json") == ([ROW], {"libtpu": "1"})


def test_names():
    names = [call.name for call in CALLS]
    assert len(set(names)) == len(names)
    assert [c.name for c in choose(["training*"])] == ["training, eqattn", "training, splash"]
    assert all(c.name.endswith("eqattn") for c in choose([]))
    with pytest.raises(ValueError, match="no call is called 'x'"):
        choose(["x"])


def judged(before: CallRow, now: CallRow) -> list[str]:
    """What has changed by more than 3%."""
    found = []
    for figure in ("total", "outside", "temporary", "cycles"):
        old, new = getattr(before, figure), getattr(now, figure)
        if new > 1.03 * old:
            found.append(f"{now.key}: {figure} rose from {old} to {new}")
        elif new < 0.97 * old:
            found.append(f"{now.key}: {figure} fell from {old} to {new}; record it: {AGAIN}")
    return found


def test_the_budget_is_one():
    assert judged(ROW, ROW) == judged(ROW, dataclasses.replace(ROW, total=2_050_000)) == []
    (worse,) = judged(ROW, dataclasses.replace(ROW, outside=1_040_000))
    assert "outside rose" in worse
    (better,) = judged(ROW, dataclasses.replace(ROW, temporary=2**19))
    assert "temporary fell" in better and "record it" in better


def test_within_budget():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu, which compiles for TPUs, is not installed")
    recorded, versions = rows.CALLS_FILE.read(BUDGET)
    if versions != cli.versions():
        pytest.skip(f"recorded with {versions}, here are {cli.versions()}; {AGAIN}")
    before = {row.key: row for row in recorded}
    names = [c.name for c in choose([])]
    chips = sorted({row.chip for row in recorded})
    wanted = [(chip, [n for n in names if (n, chip) in before]) for chip in chips]
    found = list(cli.measure(wanted, call=True))
    for now in found:
        assert isinstance(now, CallRow), now
        assert judged(before[now.key], now) == []
    assert len(found) == sum(len(named) for _, named in wanted) > 0


def test_every_call_has_a_budget():
    recorded = {row.call for row in rows.CALLS_FILE.read(BUDGET)[0]}
    assert recorded == {c.name for c in CALLS}, AGAIN
