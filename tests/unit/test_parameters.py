"""Nothing is accepted and ignored: every parameter of a public function is read."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

import eqattn


PACKAGE = Path(eqattn.__file__).parent
Function = ast.FunctionDef | ast.AsyncFunctionDef


def last_name(node: ast.expr) -> str:
    """`c` of `a.b.c`, `c[...]` and `c(...)`."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def bases(cls: ast.ClassDef, classes: dict[str, list[ast.ClassDef]]) -> list[ast.ClassDef]:
    """Those that are classes of the package, and theirs."""
    direct = [base for name in map(last_name, cls.bases) for base in classes.get(name, [])]
    return [x for base in direct for x in (base, *bases(base, classes))]


def methods(cls: ast.ClassDef) -> list[Function]:
    return [node for node in cls.body if isinstance(node, Function)]


def is_signature(function: Function) -> bool:
    """Whether it only declares its parameters."""
    return bool({"abstractmethod", "overload"} & set(map(last_name, function.decorator_list)))


def is_hook(function: Function) -> bool:
    """Whether it only returns a constant, for others to override."""
    return all(
        isinstance(x, ast.Expr | ast.Return) and isinstance(x.value, ast.Constant | None)
        for x in function.body
    )


def unread(function: Function, is_method: bool) -> list[str]:
    """The parameters that the body does not read."""
    is_method &= "staticmethod" not in map(last_name, function.decorator_list)
    a = function.args
    parameters = [*a.posonlyargs, *a.args][is_method:] + a.kwonlyargs
    parameters += [x for x in (a.vararg, a.kwarg) if x is not None]
    nodes = [node for statement in function.body for node in ast.walk(statement)]
    if any(isinstance(x, ast.Call) and ast.unparse(x) == "locals()" for x in nodes):
        return []
    read = {x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)}
    return [x.arg for x in parameters if x.arg not in read]


def ignored(trees: dict[str, ast.Module]) -> list[str]:
    """What is ignored in modules, given by their names. A method that overrides one of a base class
    has its signature from there.
    """
    classes = defaultdict(list)
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef):
            classes[node.name].append(node)
    above, overridden = defaultdict(set), set()
    for cls in (cls for several in classes.values() for cls in several):
        for base in bases(cls, classes):
            above[cls] |= {f.name for f in methods(base)}
            overridden |= {(base, f.name) for f in methods(cls)}

    def looked_at(cls: ast.ClassDef, f: Function) -> bool:
        if f.name.startswith("_") and f.name not in ("__init__", "__call__"):
            return False
        inherits = f.name in above[cls] and f.name != "__init__"
        hook = (cls, f.name) in overridden and is_hook(f)
        return not (is_signature(f) or inherits or hook)

    found = []
    for module, tree in trees.items():
        for node in tree.body:
            if getattr(node, "name", "_").startswith("_"):
                continue
            functions = [node] if isinstance(node, Function) and not is_signature(node) else []
            is_class = isinstance(node, ast.ClassDef)
            if is_class:
                functions = [f for f in methods(node) if looked_at(node, f)]
            for f in functions:
                name = f"{node.name}.{f.name}" if is_class else f.name
                found += [f"{module}: {name}({x})" for x in unread(f, is_class)]
    return found


# The rules of a primitive get all of its parameters, and `execute` what a lowering can do: a fold is
# told what to return, a ranking has no rows to finish, and the transpose of a sum has the dtypes of
# its operands. A message is read by the rule of the derivative.
EXCEPTIONS = [
    "_problem/storage.py: without_gradient(message)",
    "_sweep/centred_tangent.py: evaluate_refined(count)",
    "_sweep/fold.py: execute(finishes)",
    "_sweep/sweep.py: transpose(dtypes)",
    "_sweep/top.py: execute(finishes)",
]
# The arguments that every `traverse` has. One is of a fold, whose accumulators are known; the other
# makes steps of its own.
EXCEPTIONS += [
    "kernels/nvidia/hopper/_backward.py: Program.places_at(step)"
]  # most stay where they are
EXCEPTIONS += [f"kernels/nvidia/hopper/_traverse.py: traverse({x})" for x in ("start", "axes")]
EXCEPTIONS += ["kernels/nvidia/hopper/_traverse.py: traverse_sum(steps)"]
EXCEPTIONS += [f"kernels/nvidia/triton/_forward.py: traverse({x})" for x in ("start", "axes")]
EXCEPTIONS += ["kernels/nvidia/triton/_backward.py: traverse_sum(steps)"]


def test_every_parameter_is_read():
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 50
    trees = {str(x.relative_to(PACKAGE)): ast.parse(x.read_text()) for x in files}
    assert sorted(ignored(trees)) == sorted(EXCEPTIONS)


@pytest.mark.parametrize(
    "program, expected",
    [
        ("def f(a, *b, c=1, **d): return a", ["c", "b", "d"]),
        ("def f(a):\n    a = 1", ["a"]),
        ("def f(a, b):\n    def g(): return a\n    return lambda: b", []),
        ("def _f(a): pass", []),
        ("@typing.overload\ndef f(a): ...", []),
        ("class A:\n    def __init__(self, a): pass", ["a"]),
        ("class A:\n    def __call__(self, a): pass\n    def __add__(self, b): pass", ["a"]),
        ("class A:\n    @staticmethod\n    def f(a): pass", ["a"]),
        ("class A:\n    @abc.abstractmethod\n    def f(self, a): pass", []),
        ("class A(Generic[T]):\n    @classmethod\n    def f(cls, a): pass", ["a"]),
        ("class _A:\n    def f(self, a): pass\nclass B(_A): pass\nclass C(B):\n    def f(self, a): pass", []),
        ("class A:\n    def f(self, a): return None\nclass B(A):\n    def f(self, a): return a", []),
        ("class A:\n    def f(self, a): return 1 + 1\nclass B(A):\n    def f(self, a): return a", ["a"]),
        ("def f(a): return dict(locals())", []),
        ("class _A:\n    def __init__(self, a): pass\nclass B(_A):\n    def __init__(self, a): pass", ["a"]),
    ],
)  # fmt: skip
def test_what_is_found(program, expected):
    found = ignored({"m": ast.parse(program)})
    assert [x.split("(")[1][:-1] for x in found] == expected
