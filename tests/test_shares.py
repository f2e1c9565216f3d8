"""The choice of the cases of the default run: `tests/shares.py`."""

import ast
import json

import pytest
import shares


def test_shares_are_of_functions_that_exist():
    for name, share in json.loads(shares.SHARES.read_text()).items():
        path, function = name.split("::")
        tree = ast.parse((shares.TESTS.parent / path).read_text())
        found = [x.name for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)]
        assert function in found and (share == 0 or share > 1), name


class Item:
    def __init__(self, nodeid, marks=()):
        self.nodeid, self.name, self.marks = nodeid, nodeid.split("::")[1], list(marks)

    def get_closest_marker(self, name):
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, mark):
        self.marks.append(mark)


def taken(items: list[Item]) -> list[str]:
    shares.leave_to_slow_runs(items)
    return [item.name for item in items if not item.get_closest_marker("slow")]


@pytest.fixture
def chosen(monkeypatch, tmp_path):
    """A third of one function, none of another, and a mutant that one case noticed."""
    file = tmp_path / "shares.json"
    file.write_text(json.dumps({"tests/a.py::test_many": 3, "tests/a.py::test_one": 0}))
    monkeypatch.setattr(shares, "SHARES", file)
    monkeypatch.setattr(shares, "noticed_mutants", lambda: {"tests/a.py::test_many[4]"})
    monkeypatch.delenv("EQATTN_CASES", raising=False)
    return [Item(f"tests/a.py::test_many[{i}]") for i in range(12)]


def test_a_third_is_taken_and_what_noticed_a_mutant(chosen):
    names = set(taken(chosen))
    assert "test_many[4]" in names and len(names) in (4, 5)
    assert {int(x[10:-1]) % 2 for x in names} == {0, 1}


def test_one_case_by_itself_is_taken():
    item = Item("tests/cache/test_cache.py::test_reorder[dense]")
    assert taken([item]) == [item.name]


def test_none_is_taken_of_what_takes_too_long(chosen):
    one, other = Item("tests/a.py::test_one"), Item("tests/a.py::test_other")
    by_hand = Item("tests/a.py::test_many[12]", [pytest.mark.slow])
    assert taken([one, other, by_hand]) == ["test_other"]


def test_all_are_taken_if_the_environment_says_so(chosen, monkeypatch):
    monkeypatch.setenv("EQATTN_CASES", "all")
    assert len(taken([*chosen, Item("tests/a.py::test_one")])) == 13


REPORT = """<testsuites><testsuite>{}</testsuite></testsuites>"""
CASE = '<testcase classname="tests.a" name="{}" time="{}">{}</testcase>'


def test_shares_follow_from_durations(chosen, tmp_path):
    """Of a function that took 8 s for a third of its cases, one in twelve takes 2 s."""
    cases = [CASE.format(f"test_many[{i}]", 2, "") for i in range(4)]
    cases += [CASE.format("test_quick", 1, ""), CASE.format("test_long", 9, "")]
    cases += [CASE.format("test_skipped", 20, "<skipped/>")]
    cases += [CASE.format(f"test_pair[{i}]", 3, "") for i in range(2)]
    report = tmp_path / "run.xml"
    report.write_text(REPORT.format("".join(cases)))
    assert shares.measured(report, seconds=2) == {
        "tests/a.py::test_long": 0,
        "tests/a.py::test_many": 12,
        "tests/a.py::test_one": 0,
        "tests/a.py::test_pair": 2,
    }
