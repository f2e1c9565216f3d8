"""Shows what was found, as text and as Markdown."""

from collections.abc import Callable, Sequence

from .rows import CallRow, Row


Table = list[list[str]]  # a header, then lines


def percent(share: float | None) -> str:
    """A share as text; empty without one."""
    return "" if share is None else f"{share:.1%}"


def _more(count: int | None, than: int | None) -> str:
    return "" if count is None or than is None else f"{count / than - 1:+.0%}"


def overlays_of(row: Row) -> str:
    """Into how many overlays the instructions are cut, and the number of ways back."""
    if row.overlays is None:
        return ""
    return f"{row.overlays}" + (f", {row.back} back" if row.back else "")


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "kernel": lambda row: row.kernel,
    "chip": lambda row: row.chip,
    "tile": lambda row: f"{row.tile[0]} x {row.tile[1]}",
    "cycles": lambda row: f"{row.cycles}",
    "useful": lambda row: percent(row.useful),
    "masked": lambda row: _more(row.masked, row.cycles),
    "whole": lambda row: percent(row.whole),
    "memory": lambda row: percent(row.memory),
    "spills/fills": lambda row: f"{row.spills}/{row.fills}",
    "VMEM MiB": lambda row: f"{row.vmem / 2**20:.1f}",
    "overlays": overlays_of,
}


def _every_figure(rows: Sequence[Row]) -> Table:
    """A table with a line for each row, without columns that are empty."""
    lines = [[of(row) for of in _COLUMNS.values()] for row in rows]
    kept = [i for i in range(len(_COLUMNS)) if any(line[i] for line in lines)]
    return [[line[i] for i in kept] for line in [list(_COLUMNS), *lines]]


def _by_chip(title: str, rows: Sequence[Row], cell: Callable[[Row], str]) -> Table:
    """A table with a line for each kernel and a column for each chip."""
    chips = list(dict.fromkeys(row.chip for row in rows))
    cells = {row.key: cell(row) for row in rows}
    names = dict.fromkeys(row.kernel for row in rows)
    return [[title, *chips], *([n, *(cells.get((n, c), "") for c in chips)] for n in names)]


def _features(rows: Sequence[Row]) -> tuple[list[Row], Callable[[Row], str]]:
    """The rows of features whose plain kernel is there too, and a function that tells by how much a
    feature makes that kernel slower.
    """
    known = {row.key: row for row in rows}

    def cost(row: Row) -> str:
        plain = known[row.plain, row.chip]
        parts = [_more(row.cycles, plain.cycles), _more(row.masked, plain.masked)]
        return " / ".join(part for part in parts if part)

    return [row for row in rows if (row.plain, row.chip) in known], cost


def tables(rows: Sequence[Row]) -> str:
    """The tables of kernels and of what features cost, as aligned columns of plain text."""
    features, cost = _features(rows)
    others, found = [row for row in rows if row not in features], []
    for table in (_every_figure(others), _by_chip("feature", features, cost)):
        if len(table) > 1:
            found.append(aligned(table))
    return "\n\n".join(found)


def markdown(rows: Sequence[Row], versions: dict[str, str]) -> str:
    """The tables of the documentation."""
    found = [", ".join(f"{name} {version}" for name, version in versions.items()) + "."]
    features, cost = _features(rows)
    measured = [row for row in rows if row.useful is not None and row not in features]
    whole = [row for row in measured if row.whole is not None]
    read = [row for row in rows if row.memory is not None]
    for title, some, cell in (
        ("useful", measured, lambda row: percent(row.useful)),
        ("whole kernel", whole, lambda row: percent(row.whole)),
        ("memory", read, lambda row: percent(row.memory)),
        ("feature", features, cost),
    ):
        if some:
            found.append(_piped(_by_chip(title, some, cell)))
    for chip in dict.fromkeys(row.chip for row in rows):
        table = _piped(_every_figure([row for row in rows if row.chip == chip]))
        lines = "\n".join("    " + line for line in table.splitlines())
        found.append(f'??? info "Every figure of {chip}"\n\n{lines}')
    return "\n\n".join(found) + "\n"


def _piped(table: Table) -> str:
    header, *lines = table
    lines = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def aligned(table: Table) -> str:
    """A table as aligned columns of plain text."""
    widths = [max(map(len, column)) for column in zip(*table)]
    text = ["  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in table]
    return "\n".join([text[0], "  ".join("-" * w for w in widths), *text[1:]])


def _calls(rows: Sequence[CallRow]) -> Table:
    """A header, and a line for each row."""
    header = ["call", "chip", "MB moved", "outside kernels", "temporary MiB", "kernels ms"]
    lines = [
        [
            row.call,
            row.chip,
            f"{row.total / 1e6:,.0f}",
            f"{row.outside / 1e6:,.0f}",
            f"{row.temporary / 2**20:,.0f}",
            f"{row.kernel_ms:.2f}",
            f"{row.outside_ms:.2f}",
            f"{row.kernel_ms + row.outside_ms:.2f}",
        ]
        for row in rows
    ]
    return [[*header, "outside ms", "together ms"], *lines]


def call_tables(rows: Sequence[CallRow]) -> str:
    """The costs of whole calls, as aligned columns of plain text."""
    return aligned(_calls(rows))


def call_markdown(rows: Sequence[CallRow], versions: dict[str, str]) -> str:
    """The same table for the documentation."""
    header = ", ".join(f"{name} {version}" for name, version in versions.items()) + "."
    return f"{header}\n\n{_piped(_calls(rows))}\n"
