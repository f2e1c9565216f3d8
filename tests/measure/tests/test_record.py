"""The figures of the documentation are those of one run."""

import json
from pathlib import Path

import pytest
from measure import front
from measure.__main__ import main
from measure.bench import cases, cli, record, report
from measure.gpu_run import record as gpu_run


DOCS = Path(__file__).parents[3] / "docs"


def test_the_table_and_the_pictures_have_one_source():
    assert (DOCS / record.TABLE).read_text() == record.page(DOCS / record.DATA)
    pages = {path.name: path.read_text() for path in (DOCS / "pages").glob("*.md")}
    assert f'--8<-- "{record.TABLE}"' in pages["benchmarks.md"]
    names = {str(x.relative_to(DOCS)) for x in DOCS.glob("**/*.json")}
    assert names - {gpu_run.DATA} == {record.DATA}


def test_the_front_pages_show_the_recorded_figures():
    for path in front.PAGES:
        page = path.read_text()
        assert front.written(page) == page and front.table() in page
    assert f"benchmarks.json {front.digest()}" in front.PICTURE.read_text()


def test_remarks_are_on_the_recorded_figures():
    _, header = report.FILE.read(DOCS / record.DATA)
    page = (DOCS / "pages" / "benchmarks.md").read_text()
    assert f"These are on the figures recorded on {header['date']}." in page


def test_one_command_records_both(tmp_path, capsys):
    (tmp_path / "measurements").mkdir()
    flags = ["--quick", "--only", "cpu-f32-causal-128-fwd", "--rounds", "1", "--peers", "jax.nn"]
    flags += ["--record", str(tmp_path), "--out", str(tmp_path / "x")]
    assert main(["bench", *flags]) == 0
    assert f"recorded: {tmp_path / record.DATA}" in capsys.readouterr().out
    rows, header = report.FILE.read(tmp_path / record.DATA)
    assert {r.figure for r in rows} == {"time / jax.nn", "time ms", "temp MiB"}
    assert header["rounds"] == 1 and "--only cpu-f32-causal-128-fwd" in header["command"]
    table = (tmp_path / record.TABLE).read_text()
    assert table == record.page(tmp_path / record.DATA) and header["date"] in table
    shown = next(x for x in table.splitlines() if "time / jax.nn" in x).split("|")[3].strip()
    assert float(shown) == pytest.approx(rows[0].values["eqattn"], rel=1e-2)


@pytest.mark.parametrize("flags", [["--only", "cpu-bf16"], ["--accuracy"]])
def test_figures_of_several_runs_are_not_mixed(tmp_path, flags, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--record", str(tmp_path), *flags])
    assert "contradict each other" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_failed_run_records_nothing(tmp_path, monkeypatch, capsys):
    (tmp_path / "measurements").mkdir()
    (tmp_path / record.DATA).write_text(json.dumps("as it was"))
    monkeypatch.setattr(cli, "choose", lambda *_, **__: [cases.Case("broken", "no such kind")])
    assert main(["bench", "--peers", "--record", str(tmp_path), "--out", str(tmp_path / "x")]) == 1
    assert "not recorded" in capsys.readouterr().err
    assert json.loads((tmp_path / record.DATA).read_text()) == "as it was"
