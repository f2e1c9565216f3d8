"""The rooms of `eqattn`: each imports only from rooms of a lower level, lazy imports included."""

import ast
import re
import sys
from pathlib import Path

import jax

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


def arrows() -> set[tuple[str, str]]:
    found = {(room(m), room(n)) for m, path in MODULES.items() for n in imports(m, path)}
    return {(a, b) for a, b in found if a != b}


def levels() -> dict[str, int]:
    """The documented level of each room."""
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
    assert len(levels()) <= 25 and max(levels().values()) <= 12


def test_no_import_runs_upwards():
    level = levels()
    assert [(a, b) for a, b in sorted(arrows()) if level[a] <= level[b]] == []


def test_the_search_finds_imports():
    """Of each kind: at the top, of a module, in a function, and absolute ones."""
    assert "_sweep.fold_step" in set(imports("strategies._fold", MODULES["strategies._fold"]))
    assert {("kernels", "_sweep"), ("strategies", "_problem"), ("_tools", "__init__")} <= arrows()


def test_files_are_short():
    lengths = {m: len(path.read_text().splitlines()) for m, path in MODULES.items()}
    assert {m: n for m, n in lengths.items() if n > 400} == {}


LONG = {
    "compat.ring.ring_attention": "Of its lines, 31 are the signature of ejkernel's function.",
}
"""Functions that may have more than 60 lines of code, and why."""


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, source: list[str]) -> int:
    """The number of lines of a function that hold code: its signature counts, and its docstrings,
    blank lines and comments do not.
    """
    prose = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                prose |= set(range(node.lineno, node.end_lineno + 1))
    lines = range(function.lineno, function.end_lineno + 1)
    own = [source[n - 1].strip() for n in lines if n not in prose]
    return sum(bool(line) and line[0] != "#" for line in own)


def long_functions(source: str, most: int = 60) -> dict[str, int]:
    """The functions of more than so many lines of code, by their names within the file."""
    lines, found = source.splitlines(), {}

    def visit(node: ast.AST, names: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            here = names
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                here = (*names, child.name)
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                n = code_lines(child, lines)
                if n > most:
                    found[".".join(here)] = n
            visit(child, here)

    visit(ast.parse(source), ())
    return found


def test_a_call_enters_no_more_files_than_before():
    """A causal call whose programs are made anew. Functions count where they are defined."""
    attention, query = eqattn.attention, jax.numpy.ones((1, 64, 2, 8))
    run = lambda query: attention(query, query, query, mask="causal").attention_outputs
    run(query[:, :48])  # imports what is late
    jax.clear_caches()
    entered = set()

    def note(frame, event, _):
        if event == "call":
            entered.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run(query)
    finally:
        sys.setprofile(before)
    files = {path for path in MODULES.values() if str(path) in entered}
    assert PACKAGE / "_sweep/fold.py" in files  # programs were made anew
    assert len(files) <= 40, sorted(map(str, files))


def test_code_is_counted_without_prose():
    body = "\n".join(f"    x{i} = {i}" for i in range(60))
    source = f'class A:\n  def f(\n    a,\n  ):\n    """Says\n    this."""\n\n    # so\n{body}\n'
    assert long_functions(source) == {"A.f": 63}
    assert long_functions(source, most=63) == {}


def test_functions_are_short():
    """Those that are not are in the table, with the reason, and the table names no others."""
    found = {
        f"{module}.{name}": n
        for module, path in MODULES.items()
        for name, n in long_functions(path.read_text()).items()
    }
    assert {name: n for name, n in found.items() if name not in LONG} == {}
    assert LONG.keys() <= found.keys(), "These are short by now: take them out of the table."
