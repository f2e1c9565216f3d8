"""What was found, as text and as Markdown."""

from collections.abc import Callable, Sequence

from .rows import Row


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _masked(row: Row) -> str:
    return "" if row.masked is None else f"{row.masked / row.cycles - 1:+.0%}"


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "kernel": lambda row: row.kernel,
    "chip": lambda row: row.chip,
    "tile": lambda row: f"{row.tile[0]} x {row.tile[1]}",
    "cycles": lambda row: str(row.cycles),
    "useful": lambda row: _percent(row.useful),
    "masked": _masked,
    "whole": lambda row: _percent(row.whole),
    "memory": lambda row: _percent(row.memory),
    "spills/fills": lambda row: f"{row.spills}/{row.fills}",
    "VMEM MiB": lambda row: f"{row.vmem / 2**20:.1f}",
}


def _kernels(rows: Sequence[Row]) -> list[list[str]]:
    """A header and one line of text for each row; columns that are empty are left out."""
    lines = [[of(row) for of in _COLUMNS.values()] for row in rows]
    kept = [i for i in range(len(_COLUMNS)) if any(line[i] for line in lines)]
    return [[line[i] for i in kept] for line in [list(_COLUMNS), *lines]]


def _features(rows: Sequence[Row], plain: dict[tuple[str, str], Row]) -> list[list[str]]:
    """What each feature costs a pair that is not masked, and one that is, on each chip."""
    chips = list(dict.fromkeys(row.chip for row in rows))
    lines = [["feature", *chips]]
    for name in dict.fromkeys(row.kernel for row in rows):
        cells = {
            row.chip: _cost(row, plain[row.plain, row.chip]) for row in rows if row.kernel == name
        }
        lines.append([name, *(cells.get(chip, "") for chip in chips)])
    return lines


def _cost(row: Row, plain: Row) -> str:
    full = row.cycles / plain.cycles - 1
    if row.masked is None or plain.masked is None:
        return f"{full:+.0%}"
    return f"{full:+.0%} / {row.masked / plain.masked - 1:+.0%}"


def _split(rows: Sequence[Row]) -> list[list[list[str]]]:
    """The tables: kernels, and the features whose plain kernel is known."""
    known = {row.key: row for row in rows}
    features = [row for row in rows if (row.plain, row.chip) in known]
    others = [row for row in rows if row not in features]
    found = [_kernels(others)] if others else []
    return found + ([_features(features, known)] if features else [])


def tables(rows: Sequence[Row]) -> str:
    """Aligned columns of plain text."""
    found = []
    for lines in _split(rows):
        widths = [max(map(len, column)) for column in zip(*lines)]
        text = ["  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in lines]
        found.append("\n".join([text[0], "  ".join("-" * w for w in widths), *text[1:]]))
    return "\n\n".join(found)


def markdown(rows: Sequence[Row], versions: dict[str, str]) -> str:
    """Tables for the documentation."""
    found = [", ".join(f"{name} {version}" for name, version in versions.items()) + "."]
    for header, *lines in _split(rows):
        found.append(
            "\n".join(f"| {' | '.join(x)} |" for x in (header, ["---"] * len(header), *lines))
        )
    return "\n\n".join(found) + "\n"
