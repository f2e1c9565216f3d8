"""Records the figures of the documentation. One run writes all of them to one file, and the table
with it. Pictures are drawn from that file, so they cannot contradict the table.
"""

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .cases import Row
from .report import FILE, markdown


DATA, TABLE = "measurements/benchmarks.json", "measurements/benchmarks_data.md"
"""In the documentation's folder."""


def record(rows: Sequence[Row], machine: Mapping[str, Any], command: str, folder: Path) -> None:
    """Writes the figures of a run, and a table of them."""
    today = datetime.date.today()
    header = {"date": f"{today.day} {today:%B %Y}", "command": command, **machine}
    FILE.write(rows, header, folder / DATA)
    (folder / TABLE).write_text(page(folder / DATA))


def page(data: Path) -> str:
    """The table of recorded figures, in Markdown."""
    rows, header = FILE.read(data)
    machine = {k: v for k, v in header.items() if k not in ("date", "command")}
    parts = [
        [r for r in rows if r.case.startswith("accuracy-") is wanted] for wanted in (False, True)
    ]
    tables = [markdown(part, machine).partition("\n\n")[2] for part in parts if part]
    said = ", ".join(f"{k} {v}" for k, v in machine.items())
    first = f"Recorded on {header['date']} by `{header['command']}`: {said}."
    return "\n".join([first + "\n", *tables])
