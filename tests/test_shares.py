"""The choice of the cases of the default run: `tests/shares.py`."""

import ast
import functools
import json

import pytest
import shares


def test_shares_are_of_functions_that_exist():
    functions = functools.cache(
        lambda path: {
            x.name
            for x in ast.parse((shares.TESTS.parent / path).read_text()).body
            if isinstance(x, ast.FunctionDef)
        }
    )
    for name, share in json.loads(shares.SHARES.read_text()).items():
        path, function = shares.function_of(name).split("::")
        assert function in functions(path) and (share == 0 or share > 1), name


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
    monkeypatch.setattr(shares, "noticed_mutants", lambda: {"tests/a.py::test_many[4]": 1})
    monkeypatch.setattr(shares, "mutants_run", lambda: ["killed"])
    monkeypatch.delenv("EQATTN_CASES", raising=False)
    return [Item(f"tests/a.py::test_many[{i}]") for i in range(12)]


def test_a_third_is_taken_and_what_noticed_a_mutant(chosen):
    names = set(taken(chosen))
    assert "test_many[4]" in names and len(names) == 4
    assert {int(x[10:-1]) % 2 for x in names} == {0, 1}


def test_all_that_noticed_a_mutant_are_taken(chosen, monkeypatch):
    found = {f"tests/a.py::test_many[{i}]": 1 for i in range(6)}
    monkeypatch.setattr(shares, "noticed_mutants", lambda: found)
    assert set(taken(chosen)) == {f"test_many[{i}]" for i in range(6)}


def test_one_case_by_itself_is_taken():
    item = Item("tests/cache/test_cache.py::test_reorder[dense]")
    assert taken([item]) == [item.name]


def test_what_noticed_a_mutant_may_be_left_out(chosen):
    """The noticing case is the only one of its function that would run."""
    few = json.loads(shares.SHARES.read_text()) | {"tests/a.py::test_many": 100}
    for left in ({}, {"tests/a.py::test_many[4]": 0}):
        shares.SHARES.write_text(json.dumps(few | left))
        items = [Item(item.nodeid) for item in chosen]
        assert ("test_many[4]" in taken(items)) == (not left)


def test_none_is_taken_of_what_takes_too_long(chosen):
    one, other = Item("tests/a.py::test_one"), Item("tests/a.py::test_other")
    by_hand = Item("tests/a.py::test_many[12]", [pytest.mark.slow])
    assert taken([one, other, by_hand]) == ["test_other"]


def test_all_are_taken_if_the_environment_says_so(chosen, monkeypatch):
    monkeypatch.setenv("EQATTN_CASES", "all")
    assert len(taken([*chosen, Item("tests/a.py::test_one")])) == 13


REPORT = """<testsuites><testsuite>{}</testsuite></testsuites>"""
CASE = '<testcase classname="tests.a" name="{}" time="{}">{}</testcase>'


def test_what_takes_longest_for_its_mutants_is_left_out(chosen, monkeypatch, tmp_path):
    """Of 100 mutants two may stay unnoticed. The first case takes longest, but it noticed three."""
    noticed = {f"tests/a.py::test_many[{i}]": n for i, n in enumerate([3, 1, 1, 1, 94])}
    monkeypatch.setattr(shares, "noticed_mutants", lambda: noticed)
    monkeypatch.setattr(shares, "mutants_run", lambda: ["killed"] * 100)
    report = tmp_path / "run.xml"
    times = enumerate([9, 2.5, 2, 4, 1])
    cases = "".join(CASE.format(f"test_many[{i}]", t, "") for i, t in times)
    report.write_text(REPORT.format(cases))
    left = {name for name in shares.measured(report, seconds=1.5) if "[" in name}
    assert left == {f"tests/a.py::test_many[{i}]" for i in (1, 3)}


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
