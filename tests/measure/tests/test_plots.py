"""`python tests/measure plot`: what is drawn is what was written."""

import dataclasses

import numpy as np
import pytest
from measure.__main__ import main
from measure.bench import report
from measure.bench.cases import Row, Target
from measure.process import TESTS
from measure.tpu_report import rows as schedule_rows


plt = pytest.importorskip("matplotlib.pyplot")

from measure.plots import plot_scaling, plot_schedule  # noqa: E402


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


@pytest.fixture
def recorded(tmp_path):
    rows = []
    for tokens in (512, 128, 2048):
        case = f"cpu-f32-causal-{tokens}-fwd"
        values = {"eqattn": tokens / 100, "jax.nn": tokens**2 / 1e4}
        if tokens == 2048:
            del values["jax.nn"]  # took too much
        rows.append(Row(case, "time ms", values, {"eqattn": [1.0, 2.0]}, Target(3.0)))
        rows.append(Row(case, "temp MiB", {"eqattn": tokens / 7}))
        rows.append(Row(case.replace("causal", "causal-gqa"), "time ms", {"eqattn": 1.0}))
    path = tmp_path / "bench.json"
    report.FILE.write(rows, {"python": "3"}, path)
    assert report.FILE.read(path) == (rows, {"python": "3"})
    return path


def test_scaling(recorded):
    ax = plot_scaling(recorded)
    ours, theirs = ax.lines
    np.testing.assert_array_equal(ours.get_xydata(), [(n, n / 100) for n in (128, 512, 2048)])
    np.testing.assert_array_equal(theirs.get_xydata(), [(n, n**2 / 1e4) for n in (128, 512)])
    assert legend(ax) == ["eqattn", "jax.nn"] and ax.get_ylabel() == "CPU time of a call (ms)"
    assert ax.get_xscale() == ax.get_yscale() == "log" and ax.get_xlabel() == "length (tokens)"
    memory = plot_scaling(str(recorded), "temp MiB", ax=ax)
    assert memory is ax and ax.get_ylabel() == "temporary memory (MiB)"


@pytest.fixture
def scheduled(tmp_path):
    units = dict(matrix=0.6, vector=0.5, exponential=0.4, lanes=0.1, load=0.3, store=0.2)
    row = schedule_rows.Row(
        "forward", "v5e", "", (8, 8), 100, None, 0.55, None, None, units, 0, 0, 1
    )
    others = [
        dataclasses.replace(row, chip="v6e", units={**units, "matrix": 0.7}, useful=0.45),
        dataclasses.replace(row, kernel="paged", useful=None),
    ]
    path = tmp_path / "schedule.json"
    schedule_rows.FILE.write([row, *others], {"libtpu": "0.0.1"}, path)
    return path


def test_schedule(scheduled):
    ax = plot_schedule(scheduled)
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels == ["forward, v5e", "forward, v6e"] and ax.get_title() == "libtpu 0.0.1"
    widths = [[bar.get_width() for bar in bars] for bars in ax.containers]
    assert widths[:2] == [[0.6, 0.7], [0.5, 0.5]] and len(widths) == 6
    assert [tuple(line.get_xdata()) for line in ax.lines] == [(0.55, 0.55), (0.45, 0.45)]
    assert {"matrix units", "loads", "stores", "useful products"} <= set(legend(ax))
    one = plot_schedule(str(scheduled), "p*", "v5*")
    assert [t.get_text() for t in one.get_yticklabels()] == ["paged, v5e"] and not one.lines


def test_a_schedule_that_is_not_there(scheduled):
    with pytest.raises(ValueError, match=r"no 'backward' on 'v6e'; .*'forward', 'paged'"):
        plot_schedule(scheduled, "backward", "v6e")


WRONG = {
    "no 'time s' of .*'temp MiB', 'time ms'": lambda p: plot_scaling(p, "time s"),
    r"'cpu-f32-causal-\*-fwd', 'cpu-f32-causal-gqa-\*-fwd'": lambda p: plot_scaling(p, case="x-*"),
    "not written by `python tests/measure bench`": lambda p: plot_scaling(__file__),
    "not written by `python tests/measure tpu-report`": lambda p: plot_schedule(p),
}


@pytest.mark.parametrize("message", WRONG)
def test_errors(message, recorded):
    with pytest.raises(ValueError, match=message):
        WRONG[message](recorded)


def test_files_of_both_kinds_are_drawn(tmp_path, recorded, capsys):
    """Into the format that the name of the picture ends with."""
    for source in (recorded, TESTS / "measure/tpu_budget.json"):
        out = tmp_path / f"{source.stem}.svg"
        assert main(["plot", str(source), "--out", str(out)]) == 0
        assert "</svg>" in out.read_text() and f"written: {out}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["plot", str(tmp_path / "x.json")])
    assert "there is no file" in capsys.readouterr().err
