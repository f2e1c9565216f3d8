"""Whether the tests notice small mistakes: `python tests/mutants.py` plants one after the other.

Each file of `tests/mutations/` has a list `MUTANTS` of `(file, tests, changes)`: a file of `eqattn/`,
the tests nearest to it (paths below `tests/`, and `-k` with an expression), and changes `(old text,
new text)`, where the old text occurs once in the file. A third entry says why a change alters
nothing that a test could see; such a mutant is equivalent, and not run.

A mutant is killed if one of its tests fails. Results are kept in `tests/mutations/results.json`, so
that a run goes on where the last one ended. The file is committed, because the whole list takes
hours. A survivor is tried again once its file or its tests have changed. A killed one is tried again
after all others if code of its file has changed; comments and docstrings do not count. One that
survives while tests are skipped is undecided: those of kernels for NVIDIA GPUs want the newest JAX.
Groups of mutants that have the same tests come in the order of a hash, so that a part of the list is
a fair sample.
"""

import argparse
import ast
import dataclasses
import functools
import hashlib
import io
import json
import multiprocessing
import os
import runpy
import shlex
import shutil
import sys
import tempfile
import time
import tokenize
from multiprocessing.connection import Connection
from pathlib import Path


TESTS = Path(__file__).parent
ROOT = TESTS.parent
RESULTS = TESTS / "mutations" / "results.json"
# The type checker would cost more than the tests.
_OPTIONS = ["-o", "addopts=-m 'not slow' --strict-markers"]
_RUNS = 40  # of one process, whose memory grows


@dataclasses.dataclass(frozen=True)
class Mutant:
    """`tests` are pytest's arguments; `equivalent` is the reason why it is, else empty."""

    file: str
    tests: tuple[str, ...]
    old: str
    new: str
    equivalent: str = ""

    def __str__(self) -> str:
        text = lambda x: " ".join(x.split())
        return f"{self.file}: {text(self.old)!r} -> {text(self.new)!r}"

    def source(self, root: Path = ROOT) -> str:
        return (root / "eqattn" / self.file).read_text()

    def mutated(self) -> str:
        return self.source().replace(self.old, self.new)

    def problem(self) -> str:
        """What is wrong with this entry of the list; empty if nothing is."""
        if not (ROOT / "eqattn" / self.file).is_file():
            return "there is no such file"
        count = self.source().count(self.old)
        if count != 1:
            return f"the old text occurs {count} times, not once"
        if self.old == self.new:
            return "it changes nothing"
        try:
            compile(self.mutated(), self.file, "exec")
        except SyntaxError as e:
            return f"the new text is no Python: {e}"
        absent = [path for path in self.paths if not (ROOT / path).exists()]
        return f"there are no {absent}" if absent or not self.paths else ""

    @property
    def paths(self) -> list[str]:
        return [x for x in self.tests if x.startswith("tests/")]

    @property
    def key(self) -> str:
        return hashlib.sha256(repr((self.file, self.old, self.new)).encode()).hexdigest()[:16]

    @property
    def of_file(self) -> str:
        return hashlib.sha256(code_of(self.source()).encode()).hexdigest()[:16]

    @property
    def group(self) -> str:
        return hashlib.sha256(repr(self.tests).encode()).hexdigest()

    @property
    def of_tests(self) -> str:
        digest = hashlib.sha256(repr(self.tests).encode())
        for path in self.paths:
            path = ROOT / path
            for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
                digest.update(file.read_bytes())
        return digest.hexdigest()[:16]

    def known(self, results: dict) -> tuple[str, str]:
        """What earlier runs found, and what pytest said then."""
        verdict, said, of_file, of_tests = results.get(self.key, ("not run", "", "", ""))
        file_changed = of_file != self.of_file
        if verdict == "killed":
            return ("killed before" if file_changed else verdict), said
        stale = file_changed or of_tests != self.of_tests or verdict == "undecided"
        return ("not run", "") if stale else (verdict, said)


@functools.cache
def code_of(source: str) -> str:
    """The words of a module without its comments and docstrings, whose changes alter no verdict."""
    lines = source.splitlines(keepends=True)
    spans = []
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            if isinstance(first.value.value, str):
                spans.append((first.lineno, 0, first.end_lineno, None))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            spans.append((token.start[0], token.start[1], token.end[0], token.end[1]))
    for first, start, last, end in spans:
        for number in range(first, last + 1):
            line = lines[number - 1]
            lines[number - 1] = line[:start] + (line[end:] if end is not None else "")
    return " ".join("".join(lines).split())


def mutants() -> list[Mutant]:
    """The whole list."""
    out = []
    for path in sorted((TESTS / "mutations").glob("*.py")):
        for file, tests, changes in runpy.run_path(str(path))["MUTANTS"]:
            arguments = [f"tests/{x}" if ".py" in x else x for x in shlex.split(tests)]
            out += [Mutant(file, tuple(arguments), *change) for change in changes]
    return sorted(out, key=lambda m: m.group)


def check(chosen: list[Mutant]) -> list[str]:
    """What is wrong with the list."""
    return [f"{m}: {problem}" for m in chosen if (problem := m.problem())]


def _serve(folder: str, log: str, requests: Connection) -> None:
    """Runs pytest, again and again, in a process of its own: what JAX has compiled stays. All that
    lies in `folder` is imported anew each time.
    """
    os.chdir(folder)
    sys.path[:] = [folder, *[p for p in sys.path if Path(p).resolve() not in (ROOT, TESTS)]]
    import pytest

    while True:
        arguments = requests.recv()
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None)).startswith(folder):
                del sys.modules[name]
        with open(log, "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            code = int(pytest.main(arguments))
            sys.stdout.flush()
        requests.send(code)


class Workplace:
    """A copy of the package and its tests, with one mutant at a time."""

    def __init__(self, folder: Path, timeout: float):
        self.folder, self.timeout = folder / "copy", timeout
        self.log = folder / "log"
        ignored = shutil.ignore_patterns(".git", ".pytest_cache", ".hypothesis", ".venv", ".ci")
        shutil.copytree(ROOT, self.folder, ignore=ignored, symlinks=True)
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        os.environ["EQATTN_CASES"] = "all"  # What notices a mutant here joins the default run.
        self.worker, self.requests, self.runs = None, None, 0

    def run(self, tests: tuple[str, ...]) -> tuple[str, str]:
        """`"killed"`, `"survived"`, `"broken"`, or `"undecided"` if tests were skipped, and what
        pytest said last.
        """
        if self.runs >= _RUNS:
            self.stop()
        if self.worker is None:
            context = multiprocessing.get_context("spawn")
            self.requests, theirs = context.Pipe()
            arguments = str(self.folder), str(self.log), theirs
            self.worker = context.Process(target=_serve, args=arguments, daemon=True)
            self.worker.start()
            theirs.close()
        self.runs += 1
        self.requests.send(["-x", "-q", "-n", "0", "-p", "no:cacheprovider", *_OPTIONS, *tests])
        try:
            if not self.requests.poll(self.timeout):
                self.stop()
                return "killed", f"nothing after {self.timeout:g} s"
            code = self.requests.recv()
        except EOFError:
            self.stop()
            return "killed", "the process died"
        lines = self.log.read_text(errors="replace").splitlines()
        said = [x for x in lines if x.startswith(("FAILED", "ERROR"))] or lines[-1:] or [""]
        if code == 0 and "skipped" in lines[-1]:
            return "undecided", lines[-1][:200]
        return {0: "survived", 4: "broken", 5: "broken"}.get(code, "killed"), said[0][:200]

    def stop(self) -> None:
        if self.worker is not None:
            self.worker.kill()
            self.worker.join()
        self.worker, self.runs = None, 0

    def try_out(self, mutant: Mutant) -> tuple[str, str]:
        path = self.folder / "eqattn" / mutant.file
        original = path.stat()
        path.write_text(mutant.mutated())
        try:
            return self.run(mutant.tests)
        finally:
            path.write_text(mutant.source())
            os.utime(path, (original.st_atime, original.st_mtime))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", metavar="PATTERN", default="", help="those whose text has this")
    parser.add_argument("--list", action="store_true", help="print them and what is known of each")
    parser.add_argument("--check", action="store_true", help="only look at the list")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--survivors", action="store_true", help="run again what survived before")
    parser.add_argument("--minutes", type=float, help="stop after so long; the next run goes on")
    parser.add_argument("--timeout", type=float, default=600, help="seconds; a mutant that hangs")
    options = parser.parse_args(arguments)
    options.began = time.monotonic()

    chosen = [m for m in mutants() if options.only in str(m)]
    wrong = check(chosen)
    print(*wrong, sep="\n", end="\n" * bool(wrong))
    if options.check or wrong:
        print(f"{len(chosen)} mutants, {len(wrong)} of them out of date")
        return bool(wrong)
    known = {}
    if RESULTS.exists() and not options.fresh:
        known = json.loads(RESULTS.read_text())
    if options.list:
        for m in chosen:
            state, said = m.known(known)
            print(f"{'equivalent' if m.equivalent else state:>10}  {m}  {m.equivalent or said}")
        return 0
    todo = [m for m in chosen if not m.equivalent]
    if options.survivors:
        todo = [m for m in todo if known.get(m.key, ("",))[0] in ("survived", "broken")]
        for m in todo:
            del known[m.key]
    for state in ("not run", "killed before"):
        run_all([m for m in todo if m.known(known)[0] == state], known, options)
    states = [m.known(known)[0] for m in todo]
    for m, state in zip(todo, states):
        if state in ("survived", "broken"):
            print(f"{state}: {m}\n    tests: {shlex.join(m.tests)}")
    ran, before = len(states) - states.count("not run"), states.count("killed before")
    killed = states.count("killed") + before
    print(
        f"{killed} of {ran} killed ({100 * killed / max(ran, 1):.1f}%; {before} of them before their "
        f"file changed), {sum(bool(m.equivalent) for m in chosen)} equivalent, "
        f"{states.count('not run')} not run"
    )
    return 0 if killed == len(states) else 1


def save(known: dict) -> None:
    """A line for each mutant, without those that are no longer in the list."""
    keys = {m.key for m in mutants()}
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(known.items()) if k in keys]
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def run_all(todo: list[Mutant], known: dict, options: argparse.Namespace) -> None:
    if not todo:
        return
    from tqdm import tqdm

    passed = {}
    with tempfile.TemporaryDirectory() as folder, tqdm(todo, unit="mutant", smoothing=0) as bar:
        place = Workplace(Path(folder), options.timeout)
        for m in bar:
            if options.minutes and time.monotonic() - options.began > 60 * options.minutes:
                break
            bar.set_postfix_str(f"{m.file} {' '.join(m.old.split())[:40]}")
            if m.tests not in passed:  # a mutant is killed only by tests that pass without it
                passed[m.tests] = place.run(m.tests)
            verdict, said = passed[m.tests]
            if verdict in ("survived", "undecided"):
                verdict, said = place.try_out(m)
            else:
                verdict, said = "broken", f"its tests fail without it: {said}"
            known[m.key] = verdict, said, m.of_file, m.of_tests
            save(known)
            bar.write(f"{verdict:>8}  {m}")
        place.stop()


if __name__ == "__main__":
    sys.exit(main())
