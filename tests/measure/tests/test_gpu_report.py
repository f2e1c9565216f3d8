"""`python tests/measure gpu-report`: what it reads of machine code, and the kernel's budget."""

import importlib.util
import json
import pathlib

import pytest
from measure import cuda, gpu_peers, gpu_report, sass
from measure.__main__ import main
from measure.process import End


BUDGET = pathlib.Path(__file__).parents[1] / "gpu_budget.json"
PAGE = pathlib.Path(__file__).parents[3] / "docs" / "pages" / "gpu.md"

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
    (body,) = sass.hot_loops(LISTING)
    names = [text.split()[0].split(".")[0] for text in body]
    assert names == ["HGMMA", *["MUFU"] * 32, "SYNCS", "@!P0", "@P1"]


def test_what_the_compiler_says_is_read():
    spills = "12 bytes spill stores, 52 bytes spill loads"
    said = f"warning: {spills}\n48 bytes stack frame, {spills}\nUsed 168 registers"
    files = {"ptxas": said, "resources.txt": "smem_scratch_bytes=165888, x", "sass_ctrl": LISTING}
    found = gpu_report.figures(files)
    assert found.pop("units") == {"loop": sass.units(sass.hot_loops(LISTING)[0])}
    assert found == dict(spilled=64, registers=168, shared=165888, loop=36, masked=None, warnings=0)


def test_the_model_counts_by_unit():
    """Rates are for the 128 threads of a warpgroup, and are worked out by hand."""
    counted = {
        "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT": dict(tensor=64, shared=48),
        "HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR8].tnspB, R24": dict(tensor=32, shared=16),
        "FFMA R3, R3, R4, R5": dict(float=1),
        "IMAD.IADD R3, R3, 0x1, R5": dict(float=2),
        "@!P1 ISETP.GT.AND P6, PT, R14, R6, PT": dict(integer=2),
        "F2FP.BF16.F32.PACK_AB R3, R4, R5": dict(integer=2),
        "MUFU.EX2 R5, R5": dict(special=8),
        "LDS.64 R14, [R3+0x28000]": dict(shared=8),
        "LDSM.16.M88.4 R4, [R3]": dict(shared=16),
        "SHFL.BFLY PT, R3, R4, 0x1, 0x1f": dict(shared=4),
        "UIADD3 UR26, -UR12, UR8, URZ": {},
        "@!P1 BRA `(.L_x_16)": {},
        "LD.E R3, desc[UR4][R4.64]": {},
    }
    for text, wanted in counted.items():
        assert sass.units([text]) == dict.fromkeys(sass.UNITS, 0) | wanted | {"issue": 1}, text


def test_the_model_names_the_bound():
    cycles = dict(tensor=512, float=176, integer=236, special=528, shared=352, issue=435)
    assert sass.modelled(cycles) == (528, "special", 97, 49)
    assert sass.modelled(cycles | {"tensor": 1024}) == (1024, "tensor", 100, 66)
    assert sass.modelled(None) == ("",) * 4


def test_a_kernel_that_jax_lacks_is_absent(monkeypatch, tmp_path):
    """Where it is gone from jax there is one row, and where only its gradients are, one more."""

    def gone(library, case, gradients, folder):
        raise ImportError("cannot import name 'attention_mgpu'")

    def without_gradients(library, case, gradients, folder):
        if gradients:
            raise NotImplementedError("not supported in the backwards pass yet.")
        return [{"units": {"loop": dict(tensor=512, special=272)}}]

    name = "jax Mosaic: causal"
    monkeypatch.setattr(gpu_peers, "_kernels", gone)
    absent = {"absent": "cannot import name 'attention_mgpu'"}
    assert gpu_peers.compiled(name, tmp_path) == {name: absent}
    monkeypatch.setattr(gpu_peers, "_kernels", without_gradients)
    found = gpu_peers.compiled(name, tmp_path)
    assert list(found) == [name, f"{name}: gradients"]
    assert found[f"{name}: gradients"] == {"absent": "not supported in the backwards pass yet."}


def test_gradients_are_told_apart(monkeypatch, tmp_path):
    """By how much each loop multiplies for an exponential. They hold a forward pass, too."""
    row = lambda tensor: {"units": {"loop": dict(tensor=tensor, special=256)}}
    found = lambda *given: [row(n) for n in ((1024, 768, 512) if given[2] else (500,))]
    monkeypatch.setattr(gpu_peers, "_kernels", found)
    name = "jax Triton: full"
    kernels = {": dq": row(768), ": dk and dv": row(1024), "": row(500)}
    assert gpu_peers.compiled(name, tmp_path) == {name + x: y for x, y in kernels.items()}


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
    monkeypatch.setattr(cuda, "NEEDS", ("no-such-distribution",))
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
    found = {name: x[:4] for name, *x in cells if name in kernels and len(x) < 6}
    assert {"full", "causal", "causal: dq", "causal: dk and dv", "decode"} <= set(found)
    for name, figures in found.items():
        recorded = [kernels[name][x] for x in ("spilled", "shared", "loop", "masked")]
        assert figures == ["" if x is None else f"{x:,}" for x in recorded], name


def test_the_page_has_what_the_model_says():
    kernels = json.loads(BUDGET.read_text())["kernels"]
    lines = [x for x in PAGE.read_text().splitlines() if x.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    found = {name: x for name, *x in cells if name in kernels and len(x) > 6}
    assert {"full", "causal", "jax Mosaic: causal", "jax Triton: causal"} <= set(found)
    for name, figures in found.items():
        recorded = gpu_report.columns(kernels[name])
        loops = [recorded[gpu_report.FIGURES.index(x)] for x in ("loop", "masked")]
        full, partial = recorded[-8:-4], recorded[-4:]
        wanted = [loops[0], *full, loops[1], *partial]
        assert figures == ["" if x is None else str(x) for x in wanted], name


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs jax[cuda13]"
)
def test_budget():
    """With another compiler, record anew, by `gpu-report --json` and `peers --json` into a new file."""
    budget = json.loads(BUDGET.read_text())
    if budget["versions"] != cuda.versions():
        pytest.skip(f"recorded with {budget['versions']}")
    found = [*gpu_report.measure(), *gpu_peers.measure()]
    rows = [row for row in found if not isinstance(row, End) and "absent" not in row]
    assert {row["kernel"] for row in rows} == set(budget["kernels"])
    assert {*cuda.calls(), *gpu_peers.NAMES} <= set(budget["kernels"])
    worse = []
    for row in rows:
        assert "error" not in row, row
        ours = not row["kernel"].startswith("jax ")
        assert not ours or (row["warnings"] == 0 and row["shared"] <= 227 * 1024), row
        most = budget["kernels"][row["kernel"]]
        for name in ("spilled", "shared", "loop", "masked", "temporary"):
            if most[name] is not None and not row[name] <= 1.03 * most[name]:
                worse.append((row["kernel"], name, row[name], most[name]))
    assert not worse
