"""Shows what the bench found, as text, Markdown, JSON and a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..results_file import RowFile
from .cases import PEERS, Row


def _number(x: float | None) -> str:
    if x is None:
        return "-"
    return f"{x:.0f}" if 1000 <= abs(x) < 1e6 else f"{x:.3g}"


def _cells(rows: Sequence[Row], peers: Sequence[str]) -> list[list[str]]:
    """A header, and one line of text cells per row. A repeated case name is left out."""
    shown = [n for n in peers if any(n in r.values for r in rows)]
    lines = [["case", "figure", "eqattn", "quartiles", "target", "verdict", *shown]]
    before = None
    for row in rows:
        low_high = row.quartiles.get("eqattn")
        lines.append(
            [
                "" if row.case == before else row.case,
                row.figure,
                _number(row.values.get("eqattn")),
                "" if low_high is None else f"{low_high[0]:.3g}..{low_high[1]:.3g}",
                "" if row.target is None else str(row.target),
                row.verdict,
                *(_number(row.values.get(n)) for n in shown),
            ]
        )
        before = row.case
    return lines


def _notes(rows: Sequence[Row]) -> list[str]:
    return [f"{row.case}: {row.note}" for row in rows if row.note]


def summary(rows: Sequence[Row]) -> str:
    """A sentence that says how many targets were met; empty if there are none."""
    verdicts = [row.verdict for row in rows if row.verdict]
    missed = verdicts.count("miss")
    return f"{len(verdicts) - missed} of {len(verdicts)} targets met" if verdicts else ""


def table(rows: Sequence[Row], peers: Sequence[str] = PEERS) -> str:
    """A table as aligned columns of plain text, with one for each of the `peers` that has any."""
    lines = _cells(rows, peers)
    widths = [max(map(len, column)) for column in zip(*lines)]
    text = ["  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in lines]
    text.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join([*text, *_notes(rows), summary(rows)]).rstrip()


def markdown(rows: Sequence[Row], machine: dict[str, Any], peers: Sequence[str] = PEERS) -> str:
    """A table for the documentation. It leaves out absolute times, which say little of other
    machines.
    """
    shown = [row for row in rows if row.figure.split()[-1] not in ("ms", "s")]
    header, *lines = _cells(shown, peers)
    text = [", ".join(f"{k} {v}" for k, v in machine.items()) + ".", ""]
    text += [f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *lines)]
    return "\n".join([*text, "", *(f"- {note}" for note in _notes(rows))]).rstrip() + "\n"


FILE = RowFile("bench", "machine", Row.from_dict)


def plot(rows: Sequence[Row], path: Path) -> bool:
    """Draws bars of time and of temporary memory, on logarithmic axes. **Returns:** whether there
    is a picture: there is none without matplotlib, or without such figures.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = [[r for r in rows if r.figure.startswith(f)] for f in ("time / ", "temp MiB")]
    panels = [p for p in panels if p]
    if not panels:
        return False
    height = 1.2 + 0.45 * max(map(len, panels))
    figure, axes = plt.subplots(
        1, len(panels), figsize=(7 * len(panels), height), squeeze=False, layout="constrained"
    )
    names = ["eqattn", *PEERS]
    for axis, panel in zip(axes[0], panels):
        for i, name in enumerate(names):
            at = [(y, r.values[name]) for y, r in enumerate(panel) if r.values.get(name)]
            places = [y + 0.16 * (i - 2) for y, _ in at]
            axis.barh(places, [x for _, x in at], 0.16, label=name, color=f"C{i}")
        for y, row in enumerate(panel):
            if row.target is not None:
                axis.plot([row.target.limit] * 2, [y - 0.45, y + 0.45], "k:", lw=1.5)
        share = len({r.figure for r in panel}) == 1
        labels = [r.case if share else f"{r.case}\n({r.figure})" for r in panel]
        axis.set_yticks(range(len(panel)), labels)
        axis.set_xscale("log")
        for ticks in (axis.xaxis.set_major_formatter, axis.xaxis.set_minor_formatter):
            ticks(lambda x, _: f"{x:g}" if f"{x:e}"[0] in "125" else "")
        axis.grid(axis="x", lw=0.3)
        axis.set_axisbelow(True)
        axis.invert_yaxis()
        axis.set_title(panel[0].figure if share else "time, relative")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True
