"""`python -m eqattn gpu-report`: what it reads of machine code, and the kernel's budget."""

import importlib.util
import json
import pathlib

import pytest

from eqattn.__main__ import main
from eqattn._tools import gpu_report
from eqattn._tools.process import End


BUDGET = pathlib.Path(__file__).parents[1] / "gpu_budget.json"
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "pages" / "gpu.md"

LISTING = """
.L_x_0:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8] ;
EXPONENTIALS
.L_x_2:
        /*0030*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3] ;
        /*0040*/              @!P0 BRA `(.L_x_2) ;
        /*0050*/               @P1 BRA `(.L_x_1) ;
        /*0060*/                   BRA `(.L_x_0) ;
""".replace("EXPONENTIALS", "        /*0020*/                   MUFU.EX2 R5, R5 ;\n" * 32)


def test_the_hot_loop_is_found():
    """Not the one that waits in it, nor the one around it."""
    (body,) = gpu_report.hot_loops(LISTING)
    names = [text.split()[0].split(".")[0] for text in body]
    assert names == ["HGMMA", *["MUFU"] * 32, "SYNCS", "@!P0", "@P1"]


def test_what_the_compiler_says_is_read():
    spills = "12 bytes spill stores, 52 bytes spill loads"
    said = f"warning: {spills}\n48 bytes stack frame, {spills}\nUsed 168 registers"
    files = {"ptxas": said, "resources.txt": "smem_scratch_bytes=165888, x", "sass_ctrl": LISTING}
    assert gpu_report.figures(files) == dict(
        spilled=64, registers=168, shared=165888, loop=36, masked=None, warnings=0
    )


def test_kernels_of_a_call_are_told_apart(tmp_path):
    """Also where two have one name, and their resources another number."""
    said = "0 bytes stack frame, {} bytes spill stores, 0 bytes spill loads\nUsed 168 registers"
    for n, (name, spilled) in enumerate([("fold", 0), ("sum_columns", 4), ("sum_columns", 8)]):
        path = tmp_path / f"eqattn_{name}_{n}"
        path.with_suffix(".ptxas").write_text(said.format(spilled))
        path.with_suffix(".sass_ctrl").write_text(LISTING)
        resources = tmp_path / f"eqattn_{name}_{n + 3}.resources.txt"
        resources.write_text(f"smem_scratch_bytes={1024 * (n + 1)}")
    found = gpu_report.kernels_of(tmp_path)
    assert {name: (row["spilled"], row["shared"]) for name, row in found.items()} == {
        "fold": (0, 1024),
        "sum_columns": (4, 3072),
        "sum_columns 2": (8, 3072),
    }


def test_without_the_compiler_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(gpu_report, "NEEDS", ("no-such-distribution",))
    with pytest.raises(SystemExit):
        main(["gpu-report"])
    assert "needs no-such-distribution: python -m pip install" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["gpu-report", "--kernel", "square"])
    assert "['square'] are not among" in capsys.readouterr().err


def test_the_page_has_what_is_recorded():
    """Rows of its tables that have the name of a kernel have the figures of the budget, too."""
    kernels = json.loads(BUDGET.read_text())["kernels"]
    lines = [x for x in PAGE.read_text().splitlines() if x.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    found = {name: figures[:4] for name, *figures in cells if name in kernels}
    assert {"full", "causal", "causal: dq", "causal: dk and dv", "decode"} <= set(found)
    for name, figures in found.items():
        recorded = [kernels[name][x] for x in ("spilled", "shared", "loop", "masked")]
        assert figures == ["" if x is None else f"{x:,}" for x in recorded], name


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs jax[cuda13]"
)
def test_budget():
    """With another compiler, record anew: `python -m eqattn gpu-report --json` the budget file."""
    budget = json.loads(BUDGET.read_text())
    if budget["versions"] != gpu_report.versions():
        pytest.skip(f"recorded with {budget['versions']}")
    rows = [row for row in gpu_report.measure() if not isinstance(row, End)]
    assert {row["kernel"] for row in rows} == set(budget["kernels"]) >= set(gpu_report.calls())
    worse = []
    for row in rows:
        assert "error" not in row, row
        assert row["warnings"] == 0 and row["shared"] <= 227 * 1024, row
        most = budget["kernels"][row["kernel"]]
        for name in ("spilled", "shared", "loop", "masked", "temporary"):
            if most[name] is not None and not row[name] <= 1.03 * most[name]:
                worse.append((row["kernel"], name, row[name], most[name]))
    assert not worse
