"""The command `gpu-run`: it starts processes on the device, and writes what they find.

Several judge cases of the conformance matrix at once, as each traces one program at a time. Then
one process alone measures.
"""

import argparse
import concurrent.futures
import dataclasses
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..bench.cases import Row, Target
from ..bench.cli import machine_of, progress_bar
from ..bench.report import table
from ..process import End, results
from ..results_file import new_file
from . import record
from .cases import BY_XLA, CASES, CEILING, choose, CONFORMANCE, PEERS, small


PATIENCE = 150.0
"""Seconds that a process may be silent: more than the slowest compilation takes."""

_VERSIONS = ("jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13", "nvidia-nvjitlink")
_VERSIONS += ("torch", "tokamax")  # With nvidia-nvjitlink, XLA assembles kernels by it.
_PROCESSES = 12  # At most, that judge conformance cases at once.
_SHOWN = 20  # The most failures that are printed, one a line.
_CHILD: Sequence[str] = ("-m", f"{__package__}.child")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `gpu-run`."""
    add = parser.add_argument
    add("--rehearse", action="store_true", help="all of it on this CPU, with small sizes")
    add("--case", nargs="+", metavar="NAME", help=f"of {[x.name for x in CASES]}; None: all")
    add("--minutes", type=float, default=9.5, help="nothing is begun that many minutes later")
    add("--rounds", type=int, default=11, help="paired runs of each program")
    add("--peers", nargs="*", choices=PEERS, help="other libraries; None: those installed")
    add("--out", type=new_file, default=Path("eqattn-gpu-run"), help="path of the .json and .md")
    add("--tests", type=Path, help="the tests of a clone; None: those beside the package")
    add("--record", type=Path, metavar="FOLDER", help="write the documentation's figures, too")


@dataclasses.dataclass
class Run:
    """What processes have found so far.

    **Arguments:**

    - `tasks`: what is left to do.
    - `fields`: the rest of a `child.Job`.
    """

    tasks: list[str]
    fields: Mapping[str, Any]
    rows: list[Row] = dataclasses.field(default_factory=list)
    checks: dict[str, str] = dataclasses.field(default_factory=dict)
    machine: dict[str, Any] = dataclasses.field(default_factory=dict)
    failed: list[str] = dataclasses.field(default_factory=list)
    late: list[str] = dataclasses.field(default_factory=list)
    skip: set[str] = dataclasses.field(default_factory=set)

    @property
    def has_device(self) -> bool:
        """Whether there is a device to run on: an NVIDIA GPU, or any when it is rehearsed."""
        return self.fields["rehearsed"] or "NVIDIA" in self.machine.get("device", "")

    def take(self, item: Mapping[str, Any], busy: set[str]) -> None:
        """Takes a line of a process in. `busy`: what it has begun and not ended."""
        if "begin" in item:
            busy.add(item["begin"])
        elif "end" in item:
            busy.discard(item["end"])
        elif "row" in item:
            self.rows.append(Row.from_dict(item["row"]))
        elif "check" in item:
            self.checks[item["check"]] = item.get("failed", "")
        elif "late" in item:
            self.late.append(item["late"])
        elif "machine" in item:
            self.machine |= item["machine"]
        elif "done" in item:
            self.tasks.remove(item["done"])

    def join(self, share: "Run") -> None:
        """Takes in what processes with a share of the conformance cases have found."""
        self.checks |= share.checks
        self.machine |= share.machine
        self.failed += [x for x in share.failed if x not in self.failed]
        self.late += [x for x in share.late if x not in self.late]

    def judge(self) -> None:
        """Makes a row of the conformance cases for kernels, and another for XLA code."""
        for figure, by_xla in (("cases in the bound", False), ("XLA cases in the bound", True)):
            said = {k: v for k, v in self.checks.items() if k.startswith(BY_XLA) == by_xla}
            wrong = [f"{name}: {message}" for name, message in said.items() if message]
            aim = Target(float(max(len(said), 1)), at_least=True)
            passed = {"eqattn": float(len(said) - len(wrong))}
            self.rows.append(Row(CONFORMANCE, figure, passed, target=aim, note="; ".join(wrong)))

    @property
    def failures(self) -> list[str]:
        """A line for each failed case, and for each process that ended outside of any."""
        return [f"{name}: {said}" for name, said in self.checks.items() if said] + self.failed

    def end(self, end: End, busy: set[str]) -> bool:
        """Leaves out what a process died of. **Returns:** whether another one is to go on."""
        inner = {name for name in busy if name not in self.tasks} or busy
        judged = inner - {CONFORMANCE} if CONFORMANCE in busy else set()
        for name in judged:  # whose own message says more
            self.checks[name] = self.checks.get(name) or f"ended the process ({end})"
        if end.status and not judged:
            self.failed += [f"{name}: {end}" for name in sorted(inner) or ["the process"]]
        self.skip |= inner | self.checks.keys()
        return bool(end.status and inner and self.tasks)


def run(args: argparse.Namespace) -> int:
    """Measures and writes.

    **Returns:** 1 if something failed, else 0. **Raises:** `ValueError` for bad arguments, and
    where there is no NVIDIA GPU.
    """
    begun = time.time()
    chosen = choose(args.case)
    if args.rounds < 1:
        raise ValueError(f"--rounds must be at least 1, got {args.rounds}")
    if not args.minutes > 0:
        raise ValueError(f"--minutes must be above 0, got {args.minutes:g}")
    partial = args.rehearse or args.case is not None or args.peers is not None
    if args.record is not None and partial:
        raise ValueError(
            "--record records all cases, on a GPU: leave out --rehearse, --case and --peers"
        )
    if args.record is not None and not (args.record / record.PAGE).exists():
        raise ValueError(f"--record: there is no {args.record / record.PAGE}")
    tests = args.tests or Path(__file__).parents[3] / "tests"
    if not (tests / "matrix" / "oracle.py").exists():
        raise ValueError(
            f"{tests} has no conformance matrix, which judges the kernels: give --tests, that "
            "folder of a clone"
        )
    if importlib.util.find_spec("pytest") is None:
        raise ValueError(
            "gpu-run needs pytest, which the conformance matrix imports: python -m pip install "
            "pytest"
        )
    peers = [name for name in PEERS if installed(name)] if args.peers is None else args.peers
    found = Run(
        [CEILING, *(case.name for case in chosen)],
        dict(
            cases=[dataclasses.asdict(small(x) if args.rehearse else x) for x in chosen],
            peers=peers,
            rounds=args.rounds,
            rehearsed=args.rehearse,
            until=begun + 60 * args.minutes,
            tests=str(tests),
        ),
    )
    measure(found, args)
    if not found.has_device:
        seen = found.machine.get("device") or "; ".join(found.failed)
        raise ValueError(
            f"gpu-run needs an NVIDIA GPU, and jax has none here: {seen}. Install 'jax[cuda13]' "
            "where there is one, or give --rehearse, which tries everything on a CPU."
        )
    report(found)
    write(found, args.out)
    print(f"written: {beside(args.out, '.json')}, {beside(args.out, '.md')}")
    wrong = found.failures or not found.checks
    if args.record is not None and wrong:
        print("not recorded: something failed", file=sys.stderr)
    elif args.record is not None:
        record.write(found.rows, found.machine, args.record)
        print(f"recorded: {args.record / record.DATA}, {args.record / record.TABLE}")
    return int(bool(wrong))


def report(found: Run) -> None:
    """Prints what was found. Failed cases have lines of their own, in place of a note."""
    print(", ".join(f"{k} {v}" for k, v in found.machine.items()))
    bare = [dataclasses.replace(x, note="") if x.case == CONFORMANCE else x for x in found.rows]
    print(table(bare, PEERS))
    for line in found.failures[:_SHOWN]:
        print(f"failed: {line}", file=sys.stderr)
    if (more := len(found.failures) - _SHOWN) > 0:
        print(f"failed: {more} more", file=sys.stderr)
    if late := found.late:
        more = f" and {len(late) - _SHOWN} more" if len(late) > _SHOWN else ""
        print(f"left out as time was up: {', '.join(late[:_SHOWN])}{more}", file=sys.stderr)


def measure(found: Run, args: argparse.Namespace) -> None:
    """Judges the conformance cases, and then measures."""
    environment = dict(os.environ)
    source = str(Path(__file__).parents[3])  # which a process in another folder would not find
    environment["PYTHONPATH"] = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])
    environment["EQATTN_KERNELS"] = "xla" if args.rehearse else "pallas"
    if args.rehearse:
        environment["JAX_PLATFORMS"] = "cpu"
        environment.pop("XLA_FLAGS", None)
    bar = progress_bar(1 + len(found.tasks))
    versions = machine_of(_VERSIONS, args.rounds)
    found.machine |= {k: v for k, v in versions.items() if not str(v).startswith("(not")}
    conform(found, environment)
    bar(CONFORMANCE)

    def seen(item: Mapping[str, Any]) -> None:
        if "done" in item:
            bar(item["done"])
        if "row" in item or "done" in item:
            write(found, args.out)  # what is killed has lost nothing

    if found.has_device:
        write(found, args.out)
        work(found, environment, seen)


def conform(found: Run, environment: Mapping[str, str]) -> None:
    """Judges the conformance cases by several processes at once, each with a share of them."""
    parts = 1 if found.fields["rehearsed"] else min(os.cpu_count() or 1, _PROCESSES)
    environment = {**environment, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # they share its memory
    shares = [Run([CONFORMANCE], {**found.fields, "part": i, "parts": parts}) for i in range(parts)]
    with concurrent.futures.ThreadPoolExecutor(parts) as pool:
        try:
            list(pool.map(lambda share: work(share, environment), shares))
        except BaseException:  # such as an interrupt, at which no other process is to begin
            for share in shares:
                share.tasks.clear()
            raise
    for share in shares:
        found.join(share)
    found.judge()


def work(
    found: Run,
    environment: Mapping[str, str],
    seen: Callable[[Mapping[str, Any]], None] = lambda item: None,
) -> None:
    """Starts processes until all is done, each without what ended the one before. `seen` gets each
    line once it is taken in.
    """
    while found.tasks:
        busy: set[str] = set()
        job = dict(found.fields, tasks=found.tasks, skip=sorted(found.skip))
        for item in results(_CHILD, job, environment, PATIENCE):
            if isinstance(item, End):
                if not found.end(item, busy):
                    return
                break
            if not found.tasks:
                return  # as the others were interrupted
            found.take(item, busy)
            seen(item)


def write(found: Run, out: Path) -> None:
    record.FILE.write(found.rows, found.machine, beside(out, ".json"))
    beside(out, ".md").write_text(record.page(found.rows, found.machine))


def installed(name: str) -> bool:
    """Whether the library of a column can be imported. It is not imported."""
    library = name.split()[0]
    return library not in ("torch", "tokamax") or importlib.util.find_spec(library) is not None


def beside(out: Path, suffix: str) -> Path:
    return out.with_name(out.name + suffix)
