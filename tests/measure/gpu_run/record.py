"""The documentation's figures: the data and the table of one run, and what the page says of it."""

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..bench.cases import Row
from ..bench.report import markdown, summary
from ..results_file import RowFile
from .cases import PEERS


DATA, TABLE = "measurements/gpu.json", "measurements/gpu_data.md"
PAGE = "pages/gpu.md"
"""In the documentation's folder: the data and the table of a run, and the page that shows it."""

UNMEASURED = "Not yet measured on hardware."
NO_TABLE = "No run is recorded yet.\n"

FILE = RowFile("gpu-run", "machine", Row.from_dict)


def page(rows: Sequence[Row], machine: Mapping[str, Any]) -> str:
    """A table of all figures but absolute times, in Markdown."""
    text = markdown(rows, dict(machine), PEERS)
    return f"{text}\n{summary(rows)}\n" if summary(rows) else text


def first_words(machine: Mapping[str, Any] | None) -> str:
    """What the page says first: of the device of the recorded run, or that there is none."""
    if machine is None:
        return UNMEASURED
    return f"Measured on an {machine['device']} on {machine['date']}: see [Figures](#figures)."


def write(rows: Sequence[Row], machine: Mapping[str, Any], folder: Path) -> None:
    """Writes a run into the documentation's folder."""
    before = FILE.read(folder / DATA)[1] if (folder / DATA).exists() else None
    today = datetime.date.today()
    machine = {"date": f"{today.day} {today:%B %Y}", **machine}
    FILE.write(rows, machine, folder / DATA)
    (folder / TABLE).write_text(page(rows, machine))
    text = (folder / PAGE).read_text()
    (folder / PAGE).write_text(text.replace(first_words(before), first_words(machine), 1))
