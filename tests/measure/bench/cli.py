"""The command `bench`: it starts one child process per case, and reports."""

import argparse
import dataclasses
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata as distributions
from pathlib import Path
from typing import Any

from ..process import End, results
from ..results_file import new_file
from .cases import Case, choose, PEERS, Row
from .record import DATA, record, TABLE
from .report import FILE, markdown, plot, table


_ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NPROC"), "1"
)
_DEVICES = "--xla_force_host_platform_device_count"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `bench`."""
    add = parser.add_argument
    add("--only", nargs="+", default=[], metavar="CASE", help="names, parts of names, or globs")
    add("--list", action="store_true", help="print the names of the cases and stop")
    add("--quick", action="store_true", help="few cases, 16 times shorter, few rounds, no targets")
    add("--accuracy", action="store_true", help="errors against float64 instead of times")
    add("--rounds", type=int, help="paired runs of each case; None: 21, or 3 if quick")
    add("--peers", nargs="*", choices=PEERS, help="other libraries; None: those installed")
    add("--core", type=int, help="the core to run on; None: the last one")
    add("--out", type=new_file, default=Path("eqattn-bench"), help="path of the .json and .png")
    add(
        "--record",
        type=Path,
        metavar="FOLDER",
        help="measure all cases, accuracy too, and write what the documentation shows of them into "
        "its folder: the table, and the data of the pictures",
    )
    add("--markdown", type=new_file, help="also write the table as Markdown")


def run(args: argparse.Namespace) -> int:
    """Measures and reports.

    **Returns:** 1 if a case failed, else 0. **Raises:** `ValueError` for bad arguments.
    """
    cases = choose(args.only, args.quick, args.accuracy)
    if args.record is not None:
        if (args.only and not args.quick) or args.accuracy:
            raise ValueError(
                "--record records everything in one run, as figures of several contradict each "
                "other: leave out --only and --accuracy (with --quick, --only makes a trial)"
            )
        if not args.record.is_dir():
            raise ValueError(f"--record: there is no folder {args.record}")
        cases += choose([], args.quick, accuracy=True) if not args.only else []
    if args.list:
        print("\n".join(case.name for case in cases))
        return 0
    rounds = (3 if args.quick else 21) if args.rounds is None else args.rounds
    if rounds < 1:
        raise ValueError(f"--rounds must be at least 1, got {rounds}")
    if args.core is not None and args.core not in _cores():
        raise ValueError(f"--core must be one of {sorted(_cores())}, got {args.core}")
    names = _peers(args)
    job = dict(rounds=rounds, peers=names, core=args.core)
    machine = machine_of(names, rounds)
    rows, failed = [], []
    try:
        for item in _progress(cases, args.quick, job):
            (rows if isinstance(item, Row) else failed).append(item)
            FILE.write(rows, machine, _beside(args.out, ".json"))  # what is killed has lost nothing
    except KeyboardInterrupt:
        failed.append("interrupted")
    print(", ".join(f"{k} {v}" for k, v in machine.items()))
    print(table(rows))
    for message in failed:
        print(f"failed: {message}", file=sys.stderr)
    _save(rows, machine, args)
    if args.record is not None:
        if failed:
            print("not recorded: a case failed", file=sys.stderr)
        else:
            record(rows, machine, _command(args, rounds), args.record)
            print(f"recorded: {args.record / DATA}, {args.record / TABLE}")
    return 1 if failed else 0


def _command(args: argparse.Namespace, rounds: int) -> str:
    """The command that measures the same again."""
    parts = ["python tests/measure bench", f"--record {args.record.name}", f"--rounds {rounds}"]
    parts += ["--quick"] * args.quick + ([f"--only {' '.join(args.only)}"] if args.only else [])
    return " ".join(parts + ([] if args.peers is None else [f"--peers {' '.join(args.peers)}"]))


def _beside(out: Path, suffix: str) -> Path:
    return out.with_name(out.name + suffix)


def _save(rows: Sequence[Row], machine: dict[str, Any], args: argparse.Namespace) -> None:
    data, picture = _beside(args.out, ".json"), _beside(args.out, ".png")
    FILE.write(rows, machine, data)
    written = [str(data)]
    if plot(rows, picture):
        written.append(str(picture))
    if args.markdown is not None:
        args.markdown.write_text(markdown(rows, machine))
        written.append(str(args.markdown))
    print("written: " + ", ".join(written))


def _peers(args: argparse.Namespace) -> list[str]:
    from .peers import installed

    if args.peers is None:
        wanted = ("jax.nn", "torch") if args.quick else PEERS
        return [n for n in wanted if installed(n)]
    for name in args.peers:
        if not installed(name):
            raise ValueError(f"--peers: {name} is not installed")
    return list(args.peers)


def _cores() -> set[int]:
    known = hasattr(os, "sched_getaffinity")
    return os.sched_getaffinity(0) if known else set(range(os.cpu_count() or 1))


def machine_of(names: Sequence[str], rounds: int) -> dict[str, Any]:
    """A description of what the figures are measured on: versions, processor and load."""
    found: dict[str, Any] = {"python": platform.python_version()}
    for name in ("eqattn", "jax", "jaxlib", *(n for n in names if n != "jax.nn")):
        try:
            found[name] = distributions.version(name)
        except distributions.PackageNotFoundError:
            found[name] = "(not installed as a package)"
    found["processor"] = _processor()
    if hasattr(os, "getloadavg"):
        found["load"] = f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    return found | {"rounds": rounds}


def _processor() -> str:
    """The name of the processor, and its family and model, as machines for rent may leave the name
    without them.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        pairs = (x.partition(":") for x in lines)
        found = {name.strip(): value.strip() for name, _, value in pairs}
        return f"{found['model name']} (family {found['cpu family']}, model {found['model']})"
    except (OSError, KeyError):
        return platform.processor() or platform.machine()


def _progress(cases: Sequence[Case], quick: bool, job: dict) -> Iterator[Row | str]:
    """Yields rows as they come, and messages of what failed. With tqdm, it shows a bar."""
    groups = [[case] for case in cases]
    if quick:  # cases that share a process also share its cores and devices
        several: dict[tuple[int, int], list[Case]] = {}
        for case in cases:
            several.setdefault((case.cores, case.devices), []).append(case)
        groups = list(several.values())
    bar = progress_bar(len(cases))
    for group in groups:
        for item in _child(group, job):
            if isinstance(item, dict):
                bar(item["done"])
            else:
                yield item


def progress_bar(total: int) -> Callable[[str], None]:
    """Returns a function to call with the name of each thing that is done."""
    try:
        from tqdm import tqdm
    except ImportError:
        return lambda name: print(f"done: {name}", file=sys.stderr)
    bar = tqdm(total=total, unit="case", leave=False)

    def advance(name):
        bar.update()
        bar.set_postfix_str(name)
        if bar.n == total:
            bar.close()

    return advance


def _child(cases: Sequence[Case], job: dict) -> Iterator[Row | str | dict]:
    flags = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}={cases[0].devices}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    if cases[0].cores == 1:
        flags += " --xla_cpu_multi_thread_eigen=false"
        environment |= _ONE_THREAD | {"XLA_FLAGS": flags}
    names = ", ".join(case.name for case in cases)
    job = job | {"cases": [dataclasses.asdict(c) for c in cases]}
    for item in results(("-m", f"{__package__}.child"), job, environment):
        if not isinstance(item, End):
            yield Row.from_dict(item["row"]) if "row" in item else item
        elif item.status:
            yield f"{names}: {item}"
