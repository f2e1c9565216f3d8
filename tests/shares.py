"""Which cases of each test function run by default.

`tests/shares.json` lists the functions whose cases take long together, each with a number: 5 means that
every fifth case runs, and 0 that none does. `pytest -m slow` runs the other cases, and with
`EQATTN_CASES=all` any run has them.

A hash of their names draws the cases, because every fifth one in order could always have the same value
of some parameter. Cases that were the first to notice a mutant (`tests/mutants.py`) are drawn first, and
all of them run, but for those listed with the number 0. These take longest for the mutants that they
noticed, and most of these mutants are noticed by other cases of the default run, too. A function has the
number 0 if it has a single case, which takes long, noticed no mutant, and is not the test of a promise
(`tests/test_promises.py`).

To write the file again, measure a run, and say how many seconds a function may take:

    python -m pytest --junit-xml run.xml
    python tests/shares.py run.xml --seconds 0.5
"""

import argparse
import collections
import json
import math
import os
import runpy
import xml.etree.ElementTree
import zlib
from pathlib import Path

import pytest


TESTS = Path(__file__).parent
SHARES = TESTS / "shares.json"
# All cases of these run: the tests of what readers see and of the project's rules, the matrix, which
# makes a choice of its own, the laws, and the only tests of a compiler for TPUs and of processes.
WHOLE = (
    "tests/test_docs.py",
    "tests/test_typing.py",
    "tests/test_mutants.py",
    "tests/test_parameters.py",
    "tests/test_promises.py",
    "tests/test_readability.py",
    "tests/test_shares.py",
    "tests/examples/test_examples.py",
    "tests/examples/test_pretrained_decoder.py::test_logits_and_gradients",
    "tests/conformance/test_conformance.py",
    "tests/strategies/test_laws.py",
    "tests/kernels/test_tpu.py::test_compiled_for_a_tpu",
    "tests/tools/test_tpu_calls.py::test_within_budget",
    "tests/ring/test_processes.py::test_as_one_device",
)
ALONE = 4  # A single case takes long if it takes so many times what a function may take.
NOTICED = 0.98  # The part of the mutants that cases without the number 0 were the first to notice.


def mutants_run() -> list:
    """What `tests/mutants.py` found of each mutant that it ran: the verdict, and what the test said."""
    return list(json.loads((TESTS / "mutations" / "results.json").read_text()).values())


def noticed_mutants() -> dict[str, int]:
    """The tests that were the first to notice some mutants, and how many."""
    said = [said for verdict, said, *_ in mutants_run() if verdict == "killed"]
    return collections.Counter(x.removeprefix("FAILED ").split(" - ")[0] for x in said)


def function_of(test: str) -> str:
    return test.split("[")[0]


def leave_to_slow_runs(items: list[pytest.Item]) -> None:
    """Mark the cases that the default run does not take."""
    if os.environ.get("EQATTN_CASES") == "all":
        return
    shares = json.loads(SHARES.read_text())
    noticed = noticed_mutants().keys() - shares.keys()
    cases = collections.defaultdict(list)
    for item in items:
        if function_of(item.nodeid) in shares and item.get_closest_marker("slow") is None:
            cases[function_of(item.nodeid)].append(item)
    for function, found in cases.items():
        found.sort(key=lambda item: (item.nodeid not in noticed, zlib.crc32(item.name.encode())))
        share = shares[function]
        for item in found[math.ceil(len(found) / share) if share else 0 :]:
            if item.nodeid not in noticed:
                item.add_marker(pytest.mark.slow)


def measured(report: Path, seconds: float) -> dict[str, int]:
    """The numbers with which few functions take longer than `seconds`, by the times of a report. What
    ran because it noticed a mutant counts as drawn, so such functions get a smaller share than due.
    """
    before = json.loads(SHARES.read_text()) if SHARES.exists() else {}
    promises = runpy.run_path(str(TESTS / "test_promises.py"))["PROMISES"]
    noticed = noticed_mutants()
    needed = {function_of(x) for x in noticed} | {f"tests/{x[2]}" for x in promises}
    taken, lasted = collections.defaultdict(list), {}
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        path = case.attrib["classname"].replace(".", "/") + ".py"
        function = function_of(f"{path}::{case.attrib['name']}")
        if not {path, function} & {*WHOLE} and case.find("skipped") is None:
            taken[function].append(float(case.attrib["time"]))
            lasted[f"{path}::{case.attrib['name']}"] = float(case.attrib["time"])
    shares = {name: 0 for name, share in before.items() if not share}  # They did not run.
    spare = sum(n for name, n in noticed.items() if name not in shares)
    spare -= math.ceil(NOTICED * len(mutants_run()))
    for name in sorted(noticed.keys() & lasted, key=lambda x: -lasted[x] / noticed[x]):
        if lasted[name] > seconds and function_of(name) != name and noticed[name] <= spare:
            shares[name] = 0
            spare -= noticed[name]
    for function, times in taken.items():
        of_all = before.get(function, 1)
        share = min(math.ceil(of_all * sum(times) / seconds), of_all * len(times))
        if share > 1:
            shares[function] = share
        elif times[0] > ALONE * seconds and function not in needed:
            shares[function] = 0
    return dict(sorted(shares.items()))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("report", type=Path, help="a JUnit report of a run with the present shares")
    parser.add_argument("--seconds", type=float, default=0.5, help="what a function may take")
    options = parser.parse_args(arguments)
    shares = measured(options.report, options.seconds)
    SHARES.write_text(json.dumps(shares, indent=0) + "\n")
    print(f"{len(shares)} functions take a part of their cases")


if __name__ == "__main__":
    main()
