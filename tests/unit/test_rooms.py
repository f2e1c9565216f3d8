"""Imports of `eqattn` run downwards, and no two files import each other in a circle."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import eqattn


PACKAGE = Path(eqattn.__file__).parent
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


def room(module: str) -> str:
    """The folder or file at the top of the package that a module is in."""
    return module.partition(".")[0]


def imports(module: str, path: Path):
    """The modules of the package that a module imports anywhere, also inside of functions."""
    package = module.split(".")[: None if path.name == "__init__.py" else -1]
    package = [] if module == "__init__" else package
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names if a.name.partition(".")[0] == "eqattn"]
            yield from (name.removeprefix("eqattn").strip(".") or "__init__" for name in names)
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            parts = (node.module or "").split(".") if node.module else []
            if not node.level:
                if parts[:1] != ["eqattn"]:
                    continue
                parts = parts[1:]
            base = [*base, *parts]
            for alias in node.names:
                whole = ".".join([*base, alias.name])
                yield whole if whole in MODULES else ".".join(base) or "__init__"


GRAPH = {module: {*imports(module, path)} - {module} for module, path in MODULES.items()}


def levels() -> dict[str, int]:
    """The level of each room, of the map in contributing.md."""
    page = (PACKAGE.parent / "docs/pages/contributing.md").read_text()
    table = page[page.index("level  room") :].split("```")[0].splitlines()[1:]
    found, level = {}, 0
    for line in table:
        number, name = re.match(r" *([0-9]*) +([a-z_]+)/? ", line).groups()
        level = int(number) if number else level
        found[name] = level
    return found


def test_every_room_is_on_the_map():
    assert set(levels()) == {room(m) for m in MODULES}


def test_no_import_runs_upwards():
    level = levels()
    arrows = {(room(a), room(b)) for a, names in GRAPH.items() for b in names}
    assert [(a, b) for a, b in sorted(arrows) if a != b and level[a] <= level[b]] == []


def test_no_files_import_each_other_in_a_circle():
    try:
        TopologicalSorter(GRAPH).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_the_search_finds_imports():
    """Of each kind: at the top, of a module, in a function, and absolute ones."""
    assert "_sweep.grid" in GRAPH["_problem.mesh"] and "_problem.fold" in GRAPH["strategies._fold"]
    assert "kernels.tpu" in GRAPH["kernels"] and "_version" in GRAPH["__init__"]
