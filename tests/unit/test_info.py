"""`python -m eqattn info`."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from _programs import refuses

from eqattn import AttentionRegistry, Causal, ring_plan, sharding_plan, Zigzag
from eqattn.__main__ import main
from eqattn._info import parse_mask


def fields(text, title):
    """The names and values printed under a title."""
    _, _, rest = text.partition(f"\n{title}\n")
    lines = rest.split("\n\n")[0].splitlines()
    return dict((x[2:17].strip(), x[18:]) for x in lines)


def test_info(capsys):
    flags = "--queries 512 --heads 4 --kv-heads 2 --dim 16 --blocksize-q 128 --blocksize-k 128"
    assert main(["info", *flags.split()]) == 0
    text = capsys.readouterr().out
    assert f"jax             {jax.__version__}\n" in text and "x cpu" in text
    assert fields(text, "call")["key"] == "float32[1, 512, 2, 16]"
    runs = fields(text, "runs")
    assert (runs["strategy"], runs["method"], runs["code"]) == ("blockwise", "forward_cpu", "XLA")
    assert runs["visited"].startswith("20 of 32 blocks") and "empty ones are skipped" in text
    assert "MiB forward" in runs["temporary"] and "MiB with gradients" in runs["temporary"]
    found = fields(text, "strategies")
    assert set(found) == set(AttentionRegistry.list_implementations())
    alone = [name for name, line in found.items() if "as blockwise: there is no mesh" in line]
    assert alone == ["all_gather", "ring", "ulysses"] and "one device" not in found["ragged"]
    lowerings = fields(text, "code for blockwise")
    assert lowerings["tpu xla"] == "yes" == lowerings["tpu pallas"]
    assert "bfloat16 and float16, not float32" in lowerings["cuda pallas"]
    assert lowerings["cuda auto"].startswith("as xla: kernels have been measured on Hopper only")
    assert "no Pallas kernel" in lowerings["rocm pallas"]


def test_a_reader_that_closes_the_pipe():
    """Such as `head`: no traceback, and the status of a process that a closed pipe ended."""
    script = "python -m eqattn info --no-compile | head -1; echo ${PIPESTATUS[0]}"
    script = script.replace("python", sys.executable, 1)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=300)
    first, status = done.stdout.splitlines()
    assert first.split()[0] == "eqattn" and status in ("0", "141")  # 0: it was written at once
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


def test_an_output_that_is_closed_before_python_begins():
    script = f"{sys.executable} -m eqattn info --no-compile >&-"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "Traceback" not in done.stderr


def test_a_pipe_that_is_closed_before(monkeypatch):
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(["info", "--no-compile"]) == 141
        monkeypatch.undo()


def test_info_counts_what_the_mask_leaves(capsys):
    flags = "--queries 1024 --heads 1 --blocksize-q 64 --blocksize-k 64 --mask causal&window:63,0"
    assert main(["info", "--no-compile", *flags.split()]) == 0
    runs = fields(capsys.readouterr().out, "runs")
    assert runs["visited"].startswith(f"{16 + 15} of 256 blocks") and "temporary" not in runs
    flop = 4 * 64 * 31 * 64 * 64
    assert runs["products"].startswith(f"{flop / 1e6:.3g} MFLOP forward")


def test_info_of_nothing_and_of_too_much(capsys):
    assert main("info --no-compile --keys 0".split()) == 0
    assert "0 of 0 blocks (0.0%)" in fields(capsys.readouterr().out, "runs")["visited"]
    assert main("info --no-compile --queries 99999999999".split()) == 0
    assert "at most 2**30 queries" in fields(capsys.readouterr().out, "runs")["nothing"]


def test_info_counts_the_blocks_of_ragged(capsys):
    """One has the rows of all heads, if its keys stay in place. For many queries they do not."""
    flags = "--strategy ragged --queries 128 --keys 1024 --heads 8 --kv-heads 2 --mask none"
    assert main(["info", "--no-compile", *flags.split()]) == 0
    runs = fields(capsys.readouterr().out, "runs")
    assert runs["blocks"] == "32 queries x 128 keys"
    assert runs["grid"] == "4 x 8 blocks of all heads"
    assert runs["visited"].startswith("32 of 32 blocks")
    assert runs["products"].startswith(f"{2 * 2 * 128 * 1024 * 8 * 64 / 1e6:.3g} MFLOP")
    assert main(["info", "--no-compile", *flags.replace("128", "256").split()]) == 0
    assert fields(capsys.readouterr().out, "runs")["grid"] == "4 x 8 blocks per key head"


def test_info_has_the_blocks_of_the_kernel(capsys):
    flags = ["--no-compile", "--queries", "2048", "--platform", "pallas", "--backend", "tpu"]
    assert main(["info", *flags]) == 0
    text = capsys.readouterr().out
    assert fields(text, "runs")["code"] == "Pallas kernel"
    assert fields(text, "runs")["blocks"] == "512 queries x 512 keys"


def test_info_plans_a_ring(capsys):
    flags = "--queries 4096 --heads 8 --kv-heads 2 --dtype bfloat16 --devices 16 --layout zigzag"
    assert main(["info", "--no-compile", *flags.split()]) == 0
    plan = ring_plan(4096, 16, layout=Zigzag(), mask=Causal(), heads=8, kv_heads=2, head_dim=64)
    text = capsys.readouterr().out
    assert repr(plan) in text and plan.balance == 1
    sizes = dict(heads=8, kv_heads=2, head_dim=64)
    assert repr(sharding_plan(4096, 16, layout=Zigzag(), mask=Causal(), **sizes)) in text


def test_a_mesh_that_was_forgotten(capsys):
    """A ring without a mesh runs on one device, and says so wherever it is named."""
    assert main(["info", "--no-compile", "--strategy", "ring", "--queries", "64"]) == 0
    text, alone = capsys.readouterr().out, " on one device, as blockwise: there is no mesh"
    assert fields(text, "runs")["strategy"] == "ring" + alone
    others = fields(text, "strategies")
    for name in ("ring", "ulysses", "all_gather"):
        assert others[name].endswith(alone)
    assert not others["blockwise"].endswith(alone)


def test_info_says_why_not(capsys):
    assert main(["info", "--no-compile", "--weights", "--queries", "64"]) == 0
    text = capsys.readouterr().out
    assert "return_weights" in fields(text, "runs")["nothing"]
    assert fields(text, "strategies")["dense"].startswith("would run")
    assert main(["info", "--no-compile", "--dtype", "bfloat16", "--queries", "64"]) == 0
    kernels = fields(capsys.readouterr().out, "code for blockwise")["cuda pallas"]
    if jax.__version_info__ >= (0, 12):
        assert "forward eqattn_fold" in kernels and "query eqattn_sum_rows" in kernels
    else:
        assert "written for jax 0.12" in kernels
    assert main(["info", "--no-compile", "--platform", "pallas"]) == 0
    assert "no Pallas kernel" in fields(capsys.readouterr().out, "runs")["nothing"]


@pytest.mark.parametrize(
    "words, message",
    [
        ("", "command"),
        ("info --mask triangle", "'triangle' is not a mask"),
        ("info --mask window:-1,0", "at least 0"),
        ("info --mask chunked", "chunked:N"),
        ("info --heads 3 --kv-heads 2", "multiple"),
        ("info --heads 0", "--heads"),
        ("info --no-compile --devices 4 --keys 12", "as many keys"),
        ("info --no-compile --devices 0", "--devices must be at least 1"),
        ("info --no-compile --value-dim 0", "--value-dim must be at least 1"),
        ("info --strategy fast", "blockwise"),
        ("info --dtype int32", "floating"),
        ("info --dtype floaty", "floaty"),
        ("info --dropout 1.5", "dropout"),
        ("info --platform gpu --backend tpu", "tpu"),
        ("info --blocksize-q 0", "block"),
        ("train", "train"),
    ],
)
def test_bad_arguments(words, message, capsys):
    refuses(main, words.split(), message, capsys)


def test_programs_of_the_lab_are_named(capsys):
    """They were commands of the package."""
    for name in ("bench", "tpu-report", "gpu-report", "gpu-run"):
        assert main([name, "--list"]) == 2
        assert f"clone of the repository: python tests/measure {name}" in capsys.readouterr().err


def test_interrupted(monkeypatch, capsys):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("eqattn._info.run", interrupt)
    assert main(["info"]) == 130 and "interrupted" in capsys.readouterr().err


def test_masks():
    t = np.arange(9)
    q, k = t[:, None], t[None]
    for text, expected in {
        "causal": k <= q,
        "causal:2": k <= q + 2,
        "window:3,1": (k >= q - 3) & (k <= q + 1),
        "causal & window:2,0,1": (k <= q) & ((k >= q - 2) | (k < 1)),
        "prefix:4": (k <= q) | (k < 4),
        "chunked:3": (k <= q) & (k // 3 == q // 3),
        "block-causal:3": k // 3 <= q // 3,
    }.items():
        mask = parse_mask(text)
        assert mask is not None
        np.testing.assert_array_equal(mask.as_array(9, 9)[0], expected)
    assert parse_mask("none") is None
