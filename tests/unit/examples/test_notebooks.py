"""The notebooks run, and print what they show."""

import json
from pathlib import Path

import pytest


FOLDER = Path(__file__).parents[3] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_are_two():
    assert len(NOTEBOOKS) == 2


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_runs(path, capsys):
    namespace = {"__name__": path.stem}
    for i, cell in enumerate(json.loads(path.read_text())["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{path.name}, cell {i}", "exec"), namespace)
            shown = "".join("".join(output["text"]) for output in cell["outputs"])
            assert capsys.readouterr().out == shown
