"""`python tests/measure triton-report`: what it reads of machine code, and the kernels' budget."""

import importlib.util
import json
import pathlib
import struct
from typing import Any

import pytest
from measure import cuda, triton_report
from measure.__main__ import main
from measure.cubins import cubins
from measure.process import End


BUDGET = pathlib.Path(__file__).parents[1] / "triton_budget.json"
PAGE = pathlib.Path(__file__).parents[3] / "docs" / "pages" / "gpu.md"


def elf(size: int, filler: bytes) -> bytes:
    """What looks like machine code of so many bytes."""
    head = b"\x7fELF\x02\x01\x01".ljust(32, b"\0") + struct.pack("<QQ", 0, size)
    head += b"\0" * 6 + struct.pack("<HHHH", 0, 0, 0, 1)
    return head.ljust(64, b"\0") + filler * ((size - 64) // len(filler))


def number(n: int) -> bytes:
    """A number in groups of 7 bits."""
    return bytes([n]) if n < 128 else bytes([n & 127 | 128]) + number(n >> 7)


def literal(data: bytes) -> bytes:
    return bytes([61 << 2]) + struct.pack("<H", len(data) - 1) + data


def compressed(data: bytes, repeated: int, count: int) -> bytes:
    """Data whose last part is its end, of `repeated` bytes, once more and `count` times."""
    copies = bytes([(repeated - 1) << 2 | 2]) + struct.pack("<H", repeated)
    return number(len(data) + repeated * count) + literal(data) + copies * count


def file_of(records: bytes) -> bytes:
    """A file of records, with a header on each of its pages."""
    begin = bytes.fromhex("83af70d10d884a3f") + b"\0" * 16
    body, out = records, b""
    while body:
        part, body = body[: (1 << 16) - 24], body[(1 << 16) - 24 :]
        out += (begin if not out else b"\1" * 24) + part
    return out


def test_machine_code_is_found_in_records():
    """Plain, compressed, behind the header of a page, and in a file inside of a file."""
    plain, whole = elf(4064, b"abcdefgh"), elf(64 + 8 * 8000, b"ijklmnop")
    small = whole[: 64 + 8 * 500]
    record = b"s" + number(3) + compressed(small, 8, 7500)
    records = b"x" * 63_000 + record
    assert cubins(b"xx" + plain + b"yy") == [plain]
    assert cubins(b"before" + file_of(records)) == [whole]
    assert cubins(file_of(b"t" * 100 + file_of(records))) == [whole]
    assert cubins(b"nothing") == []
    # A header lies in the middle of this one, which is not compressed. Of a B200, `causal` broke so.
    assert cubins(file_of(b"x" * 63_000 + plain)) == [plain]


def test_sizes_may_look_like_a_record():
    """A literal of 2,100 bytes seems to begin before the record. Of an A100, `full` was so lost."""
    whole = elf(64 + 8 * 8000, b"ijklmnop")
    seeming = number(2100) + bytes([61 << 2]) + struct.pack("<H", 2099)
    record = b"s" + seeming + compressed(whole[: 64 + 8 * 500], 8, 7500)
    assert cubins(file_of(b"t" * 100 + record)) == [whole]


LOOP = """
.L_x_{n}:
        /*0010*/                   {product} R24, R8, R9 ;
EXPONENTIALS
        /*0030*/                   LDL R3, [R1] ;
        /*0050*/               @P1 BRA `(.L_x_{n}) ;
""".replace("EXPONENTIALS", "        /*0020*/                   MUFU.EX2 R5, R5 ;\n" * 8)


def test_what_the_tools_say_is_read():
    resources = " Function eqattn_fold:\n  REG:240 STACK:16 SHARED:0 LOCAL:0"
    loops = [LOOP.format(n=n, product=p) for n, p in enumerate(("HMMA.1688", "UTCHMMA", "FFMA"))]
    assert triton_report.figures(resources, "".join(loops)) == dict(
        stack=16, spills=2, registers=240, loop=11, masked=11
    )
    assert triton_report.figures(resources, loops[0])["masked"] is None


def test_chips_and_calls_have_names(monkeypatch, capsys):
    for words, said in (
        (["--chip", "gtx"], "invalid choice: 'gtx'"),
        (["--chip", "a100", "--kernel", "square"], "['square'] are not among"),
    ):
        with pytest.raises(SystemExit):
            main(["triton-report", *words])
        assert said in capsys.readouterr().err
    for chip in cuda.CHIPS:
        assert "cuda_compute_capability" in cuda.target(chip)
    assert set(triton_report.DIFFERENTIATED) <= set(triton_report.calls())


def test_the_page_has_what_is_recorded():
    kernels = json.loads(BUDGET.read_text())["kernels"]
    for chip in cuda.CHIPS:
        assert {f"{chip}: {name}" for name in triton_report.calls()} <= set(kernels)
    lines = [x for x in PAGE.read_text().splitlines() if x.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    found = {name: figures for name, *figures in cells if name in kernels}
    assert len(found) >= 25
    for name, figures in found.items():
        names = ("stack", "spills", "registers", "loop", "masked")
        recorded = [kernels[name][x] for x in names]
        assert figures == ["" if x is None else f"{x:,}" for x in recorded], name


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs jax[cuda13]"
)
@pytest.mark.parametrize(
    "cache", [{}, dict(stored="int8"), dict(dim=512, rest=64)], ids=["plain", "int8", "latents"]
)
def test_no_cache_of_any_capacity_is_copied(cache):
    """8200 tokens have a padded last block, which XLA would make in each step if something read it."""
    import jax

    mesh, place = cuda.placed(cuda.target("a100"))

    def temporary(slots):
        call, args = cuda.decoding(place, slots, platform="triton", **cache)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            lowered: Any = jax.jit(call).trace(*args).lower(lowering_platforms=("cuda",))
            return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporary(8200) <= 1.05 * temporary(8192)


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs jax[cuda13]"
)
def test_budget():
    """With another compiler, record anew, by `triton-report --json` into a new file."""
    budget = json.loads(BUDGET.read_text())
    if budget["versions"] != cuda.versions(triton_report.NEEDS):
        pytest.skip(f"recorded with {budget['versions']}")
    found = triton_report.measure(list(cuda.CHIPS))
    rows = [row for row in found if not isinstance(row, End)]
    assert {row["kernel"] for row in rows} == set(budget["kernels"])
    worse = []
    for row in rows:
        assert "error" not in row, row
        most = budget["kernels"][row["kernel"]]
        for name in ("stack", "spills", "loop", "masked", "temporary"):
            if most[name] is not None and not row[name] <= 1.03 * most[name]:
                worse.append((row["kernel"], name, row[name], most[name]))
    assert not worse
