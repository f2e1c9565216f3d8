"""`python tests/measure tpu-report`: how schedules are read, and the budget of the kernels' own."""

import dataclasses
import importlib.util
from pathlib import Path

import numpy as np
import pytest
from measure.__main__ import main
from measure.tpu_report import cli, report, rows, schedule, tune, whole
from measure.tpu_report.chips import CHIPS
from measure.tpu_report.kernels import choose, KERNELS
from measure.tpu_report.rows import Row
from measure.tpu_report.steps import Region, Step, Steps

from eqattn._sweep.grid import COL, ROW


BUDGET = Path(__file__).parents[1] / "tpu_budget.json"
AGAIN = f"python tests/measure tpu-report --peers --json tests/measure/{BUDGET.name}"


def dump(folder, bundles, name="7-my_kernel.1"):
    """Files as the compiler writes them, of bundles by cycle; the others are empty."""
    count = max(bundles) + 1
    lines = [f"  {i:#x}   : > {{ {bundles.get(i, '')} }}" for i in range(count)]
    lines[0] = lines[0].replace("0x0", "0")
    head = "= control target key start\nLB: loop body\n= control target key end\n\n"
    (folder / f"{name}-65-packed-bundles-post-ra.txt").write_text(head + "\n".join(lines))
    (folder / f"{name}-64-schedule-analysis_packed-bundles-post-ra.txt").write_text("")
    table = "\n".join(f"{bundles.get(i, '').count('vmatmul')} {i % 2} 0 0" for i in range(count))
    head = "== CAPACTIY:\nMATMUL, VALU, VLOAD:FILL, VSTORE:SPILL\n 4 2 3 1\n== UTILIZATION:\n"
    (folder / f"{name}-68-pre-delay_hlo-static-per-bundle-utilization.txt").write_text(head + table)
    vmem = "  #a [shape = 'f32[8]', space=vmem, size = 0x1000, offset = {}, scoped, tag = 'x']\n"
    (folder / f"{name}-66-post-bundle-packing-post-ra.txt").write_text(
        vmem.format("0") + vmem.format("0x3000") + vmem.format("8192").replace("vmem", "smem")
    )


DETAILS = """HLO:
  operation: %copy.1 = f32[8]{{0}} copy(f32[8]{{0}} %my_kernel.1)
  emitted bundle range: [TensorCoreSequencer:0:0x10, TensorCoreSequencer:9:0x20)
HLO:
  operation: %my_kernel.1 = f32[8]{{0}} custom-call(f32[8]{{0}} %x), custom_call_target="y"
  emitted bundle range: [TensorCoreSequencer:{first}:0x174c, TensorCoreSequencer:{last}:0x693e)
"""


def dump_overlays(folder, first, last, edges):
    """The files in which the compiler tells how it cuts a program, of which it writes one twice."""
    (folder / "5-TLP-82-hlo-details.txt").write_text(DETAILS.format(first=1, last=1))
    (folder / "5-TLP-107-hlo-details.txt").write_text(DETAILS.format(first=first, last=last))
    (folder / "4-TLP-82-hlo-details.txt").write_text("HLO:\n  operation: %other = f32[8]{0}\n")
    (folder / "4-TLP-84-overlay-graph.txt").write_text("digraph {\n}\n")
    lines = [f'  "#{a}:tlp def:#2 size:6008" -> "#{b}:tlp def:#3 size:8 <exit>"' for a, b in edges]
    (folder / "5-TLP-84-overlay-graph.txt").write_text("\n".join(["digraph {", *lines, "}"]))


def test_overlays(tmp_path):
    edges = [(0, 1), (1, 2), (2, 3), (3, 10), (1, 3), (9, 2)]
    dump_overlays(tmp_path, 1, 3, edges)
    assert schedule.overlays(tmp_path, "my_kernel") == (3, 0)  # what is after it is not its own
    dump_overlays(tmp_path, 1, 3, [*edges, (3, 2), (2, 1), (2, 1), (2, 0)])
    assert schedule.overlays(tmp_path, "my_kernel") == (3, 2)
    dump_overlays(tmp_path, 2, 2, edges)
    assert schedule.overlays(tmp_path, "my_kernel") == (1, 0)
    with pytest.raises(ValueError, match="did not tell where .* of my_kern lie"):
        schedule.overlays(tmp_path, "my_kern")


def branch(predicate, target):
    return f"%9 = sbr.rel ({predicate}) target bundleno = {target} (0x0), region = 5"


PRODUCT = "%1 = vmatmul.bf16.gmra.mxu0 %v1_v2  ;;  %2 = vmatmul.f32.gmra.mxu1 %v3_v4"
# A loop from 10 to its branch at 100. A branch runs 4 bundles more before it jumps.
KERNEL = {
    0: "",
    20: branch("%p1_p0", 35),  # the first of a row: 25 to 35
    40: branch("!%p2_p3", 60),  # masked: 45 to 60, and in it
    46: PRODUCT,
    50: branch("%p3_p1", 58),  # what is seldom done: 55 to 58
    60: branch("%p2_p3", 80),  # not masked: 65 to 80
    66: PRODUCT,
    67: PRODUCT,
    80: branch("%p4_p1", 95),  # the last of a row: 85 to 95
    100: branch("!%p5_p1", 10),
    110: "",
}


def steps(tmp_path, bundles, **kw):
    dump(tmp_path, bundles)
    (start,) = schedule.dumped(tmp_path, "my_kernel")
    return Steps(schedule.read(tmp_path, start, CHIPS["v5e"]), **kw)


def test_read(tmp_path):
    dump(tmp_path, KERNEL)
    dump(tmp_path, KERNEL, "8-my_kernel_of_others")
    assert schedule.dumped(tmp_path, "my_kernel") == ["7-my_kernel.1"]
    read = schedule.read(tmp_path, "7-my_kernel.1", CHIPS["v5e"])
    assert read.cycles == 111 and read.vmem == 0x4000
    assert dict(enumerate(read.products)) == {
        i: 24 * (i in (46, 66, 67)) for i in range(111)
    }  # a matrix unit is busy with bfloat16 for 16 cycles, with float32 for 8
    assert [(b.at, b.target, b.predicate, b.value) for b in read.branches][:2] == [
        (20, 35, "p1", True),
        (40, 60, "p2", False),
    ]


def test_steps(tmp_path):
    got = steps(tmp_path, KERNEL)
    loop = 105 - 10
    assert got.full.cycles == loop - 10 - 15 - 10 and got.full.products == 48
    assert got.masked is None  # has half of the products: it is no visit of a pair
    assert got.full.share("VALU") == got.full.total(np.arange(111) % 2) / (2 * got.full.cycles)
    assert got.full.matrix_share == 48 / (4 * got.full.cycles)
    assert got.edges == [10, 10]
    rest = steps(tmp_path, KERNEL, cleans=True)  # without the longest form
    assert rest.full.cycles == loop - 10 - 15 - 10 - 3 and rest.full.products == 24


def test_masked_steps(tmp_path):
    got = steps(tmp_path, KERNEL | {47: PRODUCT})
    loop = 105 - 10
    assert got.masked is not None
    # Both regions follow from one predicate, so that just one of them is run.
    steps_of = {got.full.cycles, got.masked.cycles}
    assert steps_of == {loop - 10 - 15 - 10, loop - 10 - 15 - 10 - 3}
    inner = steps(tmp_path, KERNEL | {47: PRODUCT, 50: branch("%p3_p1", 46)}, innermost=True)
    assert inner.full.cycles == 55 - 46


def test_a_loop_without_conditions(tmp_path):
    got = steps(tmp_path, {5: PRODUCT, 20: branch("%p1_p0", 3), 30: ""})
    assert got.full.cycles == 25 - 3 and got.masked is None and got.edges == []
    (tmp_path / "7-my_kernel.1-65-packed-bundles-post-ra.txt").write_text("  0   : { }")
    with pytest.raises(ValueError, match="different numbers of cycles"):
        schedule.read(tmp_path, "7-my_kernel.1", CHIPS["v5e"])
    dump(tmp_path, {5: PRODUCT})
    (tmp_path / "7-my_kernel.1-66-post-bundle-packing-post-ra.txt").unlink()
    with pytest.raises(ValueError, match="wrote 0 files post-bundle"):
        schedule.read(tmp_path, "7-my_kernel.1", CHIPS["v5e"])
    with pytest.raises(ValueError, match="no products"):
        steps(tmp_path, {20: branch("%p1_p0", 3), 30: ""})


@pytest.mark.parametrize("tokens, tile", [(64, (8, 8)), (60, (8, 16)), (48, (16, 8)), (8, (8, 8))])
@pytest.mark.parametrize("lag, corners", [(0, False), (0, True), (1, True)])
@pytest.mark.parametrize("heads", [1, 3])
def test_steps_of_a_whole_kernel(tokens, tile, lag, corners, heads):
    queries, keys = tile
    visible = np.tril(np.ones((tokens, tokens), bool))
    for kept, axis in (((ROW,), 0), ((COL,), 1))[: 1 if lag else 2]:  # a fold keeps rows
        blocks = [
            [visible[i : i + queries, j : j + keys] for j in range(0, tokens, keys)]
            for i in range(0, tokens, queries)
        ]
        blocks = blocks if axis == 0 else list(zip(*blocks))
        live = [b for row in blocks for b in row if b.any()] * heads
        kinds = ["full" if b.all() else "masked" for b in live]
        if corners:
            corner = [not b[: queries // 2, keys // 2 :].any() for b in live]
            kinds = ["corner" if c and k == "masked" else k for c, k in zip(corner, kinds)]
        if lag:
            kinds.append("full")
            for i in range(1, len(kinds)):
                if kinds[i] == "full" and kinds[i - 1] == "corner":
                    kinds[i] = "after"
        got = whole.count(tokens, tile, heads, kept, lag, corners)
        want = [kinds.count(k) for k in ("full", "masked", "corner", "after")]
        rows = heads * len(blocks)
        lists = 1 if lag else heads
        assert got == whole.Count(*want, rows=rows, lists=lists, beside=int(lag))
    assert whole.visible_pairs(tokens) == visible.sum()


def test_cycles_of_a_whole_kernel(tmp_path):
    some = steps(tmp_path, KERNEL)
    cycles = {"full": 100, "masked": 130, "corner": 110, "after": 90}
    vars(some).update({k: Step(some.schedule, (Region(0, n),)) for k, n in cycles.items()})
    some.edges = [7, 11]
    count = whole.Count(full=5, masked=2, corner=3, after=4, rows=6, lists=2, beside=1)
    assert count.cycles(some) == 500 + 260 + 330 + 360 + 6 * 18 + 11
    assert count.cycles(some, (1,)) == 500 + 260 + 330 + 360 + 6 * 7 + 2 * 11 + 11


ROW_ = Row("forward", "v6e", "", (8, 16), 100, 130, 0.5, 0.25, None, {"matrix": 0.6}, 5, 6, 2**20)


def test_tables(tmp_path):
    cap = dataclasses.replace(ROW_, kernel="cap", plain="forward", cycles=110, masked=156)
    text = report.tables([ROW_, cap])
    assert "forward  v6e   8 x 16  100     50.0%   +30%    25.0%  5/6           1.0" in text
    assert text.splitlines()[-1].split() == ["cap", "+10%", "/", "+20%"]
    page = report.markdown([ROW_, cap], {"libtpu": "1"})
    assert page.startswith("libtpu 1.\n\n| useful | v6e |") and "| forward | 50.0% |" in page
    assert "| forward | 25.0% |" in page and "| cap | +10% / +20% |" in page
    assert "\n    | cap | v6e | 8 x 16 | 110 | 50.0% | +42% | 25.0% | 5/6 | 1.0 |\n" in page
    rows.FILE.write([ROW_, cap], {"libtpu": "1"}, tmp_path / "x.json")
    assert rows.FILE.read(tmp_path / "x.json") == ([ROW_, cap], {"libtpu": "1"})


def judged(before: Row, now: Row) -> list[str]:
    """What has changed by more than 3%."""
    found = []
    for figure in ("cycles", "masked", "spills", "vmem"):
        old, new = getattr(before, figure) or 0, getattr(now, figure) or 0
        if new > 1.03 * old:
            found.append(f"{now.key}: {figure} rose from {old} to {new}")
        elif new < 0.97 * old:
            found.append(f"{now.key}: {figure} fell from {old} to {new}; record it: {AGAIN}")
    if now.back:
        found.append(f"{now.key}: {now.back} ways back among its {now.overlays} overlays")
    return found


def test_the_budget_is_one():
    close = dataclasses.replace(ROW_, cycles=102, masked=127, spills=5)
    assert judged(ROW_, ROW_) == judged(ROW_, close) == []
    worse = dataclasses.replace(ROW_, cycles=104, vmem=2 * ROW_.vmem)
    assert [x.split(": ")[1].split()[:2] for x in judged(ROW_, worse)] == [
        ["cycles", "rose"],
        ["vmem", "rose"],
    ]
    (better,) = judged(ROW_, dataclasses.replace(ROW_, spills=4))
    assert "spills fell from 5 to 4; record it" in better
    (fetched,) = judged(ROW_, dataclasses.replace(ROW_, overlays=3, back=1))
    assert "1 ways back among its 3 overlays" in fetched


@pytest.mark.parametrize("chip", CHIPS)
def test_within_budget(chip):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu, which compiles for TPUs, is not installed")
    recorded, versions = rows.FILE.read(BUDGET)
    if versions != cli.versions():
        pytest.skip(f"recorded with {versions}, here are {cli.versions()}; {AGAIN}")
    before = {row.key: row for row in recorded}
    names = [kernel.name for kernel in KERNELS]
    count = 0
    for now in cli.measure([(chip, names)]):
        assert isinstance(now, Row), now
        assert judged(before[now.key], now) == []
        count += 1
    assert count == len(names)


def test_every_kernel_has_a_budget():
    recorded = {row.key: row for row in rows.FILE.read(BUDGET)[0]}
    missing = {(k.name, chip) for k in KERNELS for chip in CHIPS} - set(recorded)
    assert not missing, AGAIN
    tiles = {kernel.name: kernel.tile() for kernel in choose([], peers=True)}
    slow = {row.kernel: row.tile for row in recorded.values() if row.chip == "v5e"}
    assert slow | {name: x for name, x in tiles.items() if name not in slow} == tiles


def test_names():
    names = [kernel.name for kernel in choose([], peers=True)]
    assert len(set(names)) == len(names) > len(KERNELS)
    assert {k.plain for k in KERNELS} - {""} <= set(names)
    assert [k.name for k in choose(["backward*"])] == [n for n in names if n.startswith("backward")]


def test_other_sizes_of_a_kernel():
    (kernel,) = choose(["prompt"])
    names = tune.names([kernel])
    assert names[0] == "prompt" and len(set(names)) == 1 + len(kernel.sizes)
    assert "prompt at 64 x 128" in names
    (sized,) = choose(["prompt at 64 x 128"], peers=True)
    assert sized.tile() == (64, 128) != kernel.tile() and sized.call == kernel.call
    with pytest.raises(ValueError, match="'forward, sinks' has no other block sizes"):
        tune.names(choose(["forward, sinks"]))


@pytest.mark.parametrize("more", [["--call"], ["--peers"], ["--json", "x"], ["--markdown", "x"]])
def test_what_does_not_go_with_tune(more, capsys):
    with pytest.raises(SystemExit):
        main(["tpu-report", "--tune", *more])
    assert "--tune compares kernels" in capsys.readouterr().err


def test_sizes_are_ranked():
    """By the whole kernel, or by the slower of units and memory. Of equals, the smaller is first,
    and those whose instructions are loaded again are last.
    """
    of = lambda name, tile, **kw: dataclasses.replace(ROW_, kernel=name, tile=tile, **kw)
    whole = [
        of("forward", (8, 16)),
        of("forward at 8 x 16", (8, 16)),
        of("forward at 16 x 16", (16, 16), whole=0.2501),
        of("forward at 8 x 8", (8, 8), whole=0.3, overlays=3, back=1),
        of("forward at 32 x 8", (32, 8), whole=0.28),
    ]
    kept = dict(whole=None, useful=None)
    read = [
        of("decode", (1, 8), cycles=50, memory=2.0, **kept),
        of("decode at 1 x 16", (1, 16), cycles=80, memory=2.5, **kept),
        of("decode at 1 x 4", (1, 4), cycles=60, memory=0.9, **kept),
    ]
    header, *lines = tune.ranked([*whole, *read])
    found = [(line[0], line[2], line[-1]) for line in lines]
    assert found == [
        ("forward", "32 x 8", ""),
        ("forward", "8 x 16", "yes"),
        ("forward", "16 x 16", ""),
        ("forward", "8 x 8", ""),
        ("decode", "1 x 8", "yes"),
        ("decode", "1 x 16", ""),
        ("decode", "1 x 4", ""),
    ]
    assert all(len(line) == len(header) for line in lines) and lines[3][-2] == "3, 1 back"


def test_what_fails_is_reported(monkeypatch, tmp_path, capsys):
    """Each kernel on its own: the others are measured."""
    program = (
        "import json, sys\n"
        "job = json.load(sys.stdin)\n"
        "row = dict(kernel='forward', chip=job['chip'], plain='', tile=[8, 8], cycles=9, masked=None)\n"
        "row |= dict(useful=.5, whole=None, memory=None, units={}, spills=0, fills=0, vmem=1)\n"
        "for name in job['names']:\n"
        "    if name == 'forward': print(json.dumps({'row': row}), flush=True)\n"
        "    elif name == 'forward, bias': sys.exit('the compiler fell')\n"
        "    else: print(json.dumps({'failed': name, 'why': 'no'}), flush=True)\n"
    )
    monkeypatch.setattr(cli, "CHILD", ("-c", program))
    names = ["forward", "forward, cap", "forward, bias", "forward, sinks"]
    got = list(cli.measure([("v5e", names)]))
    assert isinstance(got[0], Row) and got[0].key == ("forward", "v5e")
    assert got[1:] == [
        "forward, cap on v5e: no",
        "forward, bias on v5e: status 1: the compiler fell",
        "forward, sinks on v5e: no",
    ]


def test_kernels_of_other_sizes_are_shown(monkeypatch, tmp_path, capsys):
    """Where they are named: they are not among all kernels. A file keeps them, too."""
    program = (
        "import json, sys\n"
        "job = json.load(sys.stdin)\n"
        f"row = {ROW_.to_dict()!r}\n"
        "for name in job['names']:\n"
        "    print(json.dumps({'row': row | {'kernel': name, 'chip': job['chip']}}), flush=True)\n"
    )
    monkeypatch.setattr(cli, "CHILD", ("-c", program))
    monkeypatch.setattr(cli, "versions", lambda: {"libtpu": "1"})
    names = ["forward, T=32768 at 2048 x 2048", "backward", "forward"]
    files = tmp_path / "x.json", tmp_path / "x.md"
    more = ["--json", str(files[0]), "--markdown", str(files[1])]
    assert main(["tpu-report", "--chip", "v6e", "--kernel", *names, *more]) == 0
    *_, first, second, third = capsys.readouterr().out.splitlines()
    for line, name in zip((first, second, third), ("forward", "backward", names[0])):
        assert line.startswith(f"{name}  ") and "8 x 16" in line
    assert [row.kernel for row in rows.FILE.read(files[0])[0]] == ["forward", "backward", names[0]]
    assert f"| {names[0]} | v6e | 8 x 16 |" in files[1].read_text()
