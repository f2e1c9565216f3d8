"""The command `gpu-run`: it starts processes on the device, and writes what they find."""

import argparse
import dataclasses
import importlib.util
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..bench.cases import Row, Target
from ..bench.cli import machine_of, progress_bar
from ..bench.report import table
from ..process import End, results
from . import record
from .cases import CASES, CEILING, choose, CONFORMANCE, PEERS, small


PATIENCE = 150.0
"""Seconds that a process may be silent: more than the slowest compilation takes."""

_VERSIONS = ("jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13", "nvidia-nvjitlink")
_VERSIONS += ("torch", "tokamax")  # With nvidia-nvjitlink, XLA assembles kernels by it.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `gpu-run`."""
    add = parser.add_argument
    add("--rehearse", action="store_true", help="all of it on this CPU, with small sizes")
    add("--case", nargs="+", metavar="NAME", help=f"of {[x.name for x in CASES]}; None: all")
    add("--minutes", type=float, default=9.5, help="nothing is begun that many minutes later")
    add("--rounds", type=int, default=11, help="paired runs of each program")
    add("--peers", nargs="*", choices=PEERS, help="other libraries; None: those installed")
    add("--out", type=Path, default=Path("eqattn-gpu-run"), help="path of the .json and .md")
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
            if item["done"] == CONFORMANCE:
                self.judge()

    def judge(self) -> None:
        """Makes a row of the cases of the conformance matrix."""
        wrong = {name: said for name, said in self.checks.items() if said}
        note = "; ".join(f"{name}: {said}" for name, said in wrong.items())
        passed = float(len(self.checks) - len(wrong))
        aim = Target(float(max(len(self.checks), 1)), at_least=True)
        row = Row(CONFORMANCE, "cases in the bound", {"eqattn": passed}, target=aim, note=note)
        self.rows.append(row)

    def end(self, end: End, busy: set[str]) -> bool:
        """Leaves out what a process died of. **Returns:** whether another one is to go on."""
        inner = {name for name in busy if name not in self.tasks} or busy
        if end.status:
            self.failed.append(f"{', '.join(sorted(inner)) or 'the process'}: {end}")
        if CONFORMANCE in busy:
            self.checks |= dict.fromkeys(inner - {CONFORMANCE}, f"ended the process ({end})")
        self.skip |= inner | self.checks.keys()
        return bool(end.status and inner and self.tasks)


def run(args: argparse.Namespace) -> int:
    """Measures and writes.

    **Returns:** 1 if something failed, else 0. **Raises:** `ValueError` for bad arguments, and
    where there is no NVIDIA GPU.
    """
    begun = time.time()
    chosen = choose(args.case)
    partial = args.rehearse or args.case is not None or args.peers is not None
    if args.record is not None and partial:
        raise ValueError(
            "--record records all cases, on a GPU: leave out --rehearse, --case and --peers"
        )
    if args.record is not None and not (args.record / record.PAGE).exists():
        raise ValueError(f"--record: there is no {args.record / record.PAGE}")
    tests = args.tests or Path(__file__).parents[3] / "tests"
    if not (tests / "conformance" / "oracle.py").exists():
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
        [CEILING, CONFORMANCE, *(case.name for case in chosen)],
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
    if not args.rehearse and "NVIDIA" not in found.machine.get("device", ""):
        seen = found.machine.get("device") or "; ".join(found.failed)
        raise ValueError(
            f"gpu-run needs an NVIDIA GPU, and jax has none here: {seen}. Install 'jax[cuda13]' "
            "where there is one, or give --rehearse, which tries everything on a CPU."
        )
    rows = found.rows
    print(", ".join(f"{k} {v}" for k, v in found.machine.items()))
    print(table(rows, PEERS))
    for message in found.failed:
        print(f"failed: {message}", file=sys.stderr)
    if found.late:
        print(f"left out as time was up: {', '.join(found.late)}", file=sys.stderr)
    write(found, args.out)
    print(f"written: {beside(args.out, '.json')}, {beside(args.out, '.md')}")
    wrong = found.failed or any(found.checks.values()) or not found.checks
    if args.record is not None and wrong:
        print("not recorded: something failed", file=sys.stderr)
    elif args.record is not None:
        record.write(rows, found.machine, args.record)
        print(f"recorded: {args.record / record.DATA}, {args.record / record.TABLE}")
    return int(bool(wrong))


def measure(found: Run, args: argparse.Namespace) -> None:
    """Starts processes until all is done, each without what ended the one before."""
    environment = dict(os.environ)
    source = str(Path(__file__).parents[3])  # which a process in another folder would not find
    environment["PYTHONPATH"] = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])
    environment["EQATTN_KERNELS"] = "xla" if args.rehearse else "pallas"
    if args.rehearse:
        environment["JAX_PLATFORMS"] = "cpu"
        environment.pop("XLA_FLAGS", None)
    bar = progress_bar(len(found.tasks))
    versions = machine_of(_VERSIONS, args.rounds)
    found.machine |= {k: v for k, v in versions.items() if not str(v).startswith("(not")}
    while found.tasks:
        busy: set[str] = set()
        job = dict(found.fields, tasks=found.tasks, skip=sorted(found.skip))
        for item in results(("-m", f"{__package__}.child"), job, environment, PATIENCE):
            if isinstance(item, End):
                if not found.end(item, busy):
                    return
                break
            found.take(item, busy)
            if "done" in item:
                bar(item["done"])
            if "row" in item or "done" in item:
                write(found, args.out)  # what is killed has lost nothing


def write(found: Run, out: Path) -> None:
    record.FILE.write(found.rows, found.machine, beside(out, ".json"))
    beside(out, ".md").write_text(record.page(found.rows, found.machine))


def installed(name: str) -> bool:
    """Whether the library of a column can be imported. It is not imported."""
    library = name.split()[0]
    return library not in ("torch", "tokamax") or importlib.util.find_spec(library) is not None


def beside(out: Path, suffix: str) -> Path:
    return out.with_name(out.name + suffix)
