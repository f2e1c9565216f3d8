"""Python with `-O` or `-OO` leaves asserts out, and computes the same numbers."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import eqattn


PACKAGE = Path(eqattn.__file__).parent

# These only look at their arguments. So an assert that calls nothing else does no work.
LOOKS = set("abs all any isinstance issubclass items len max min sorted sum type values".split())


def does_work(node: ast.Assert) -> bool:
    """Whether an assert binds a name, waits or yields, or calls what may change something."""
    for x in ast.walk(node):
        if isinstance(x, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom):
            return True
        if isinstance(x, ast.Call):
            called = x.func.attr if isinstance(x.func, ast.Attribute) else ast.unparse(x.func)
            if called not in LOOKS:
                return True
    return False


@pytest.mark.parametrize(
    "code, works",
    [
        ("assert (x := y) is not None", True),
        ("assert all((last := i) for i in y)", True),
        ("assert items.pop() == 1", True),
        ("assert check(x)", True),
        ("assert x is not None and len(x.found) == 3, x", False),
        ("assert abs(out - other).max() < 1e-4", False),
    ],
)
def test_asserts_that_do_work_are_found(code, works):
    assert does_work(ast.parse(code).body[0]) == works


def test_no_assert_of_the_package_does_work():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assert) and does_work(node):
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}")
            if isinstance(node, ast.Name) and node.id == "__debug__":
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: __debug__")
    assert found == []


CHILD = """
import json, sys
import jax.numpy as jnp
from eqattn import Causal, stats
given = json.load(sys.stdin)
q, k, lse = (jnp.asarray(given[x], jnp.float32) for x in ("q", "k", "lse"))
call = dict(mask=Causal(), logsumexp=lse)
found = {name: getattr(stats, name)(q, k, **call).tolist() for name in ("mass", "entropy")}
print(json.dumps({"debug": __debug__, **found}))
"""


@pytest.mark.parametrize("flag", ["-OO"])
def test_statistics_of_a_known_logsumexp_without_asserts(flag):
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 1, 7, 2, 4))
    logits = np.einsum("bthd,bshd->bhts", q, k) / 2
    logits = np.where(np.tri(7, dtype=bool), logits, -np.inf)
    lse = np.log(np.exp(logits).sum(-1))
    p = np.exp(logits - lse[..., None])
    entropy = -np.sum(p * np.log(np.where(p > 0, p, 1)), -1)
    given = dict(q=q.tolist(), k=k.tolist(), lse=np.swapaxes(lse, 1, 2).tolist())
    child = subprocess.run(
        [sys.executable, flag, "-c", CHILD], input=json.dumps(given), capture_output=True, text=True
    )
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout)
    assert found["debug"] is False
    np.testing.assert_allclose(found["mass"], np.moveaxis(p.sum(2), 1, 2), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["entropy"], np.swapaxes(entropy, 1, 2), rtol=1e-5, atol=1e-6)
