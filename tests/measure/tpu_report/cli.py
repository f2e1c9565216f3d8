"""The command `tpu-report`: it starts one child process for each chip, and reports."""

import argparse
import dataclasses
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata as distributions
from pathlib import Path
from typing import Any

from ..bench.cli import progress_bar
from ..process import End, results
from ..results_file import new_file, RowFile
from . import report
from .chips import CHIPS
from .rows import CallRow, CALLS_FILE, FILE, Row


CHILD = ("-m", f"{__package__}.child")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `tpu-report`."""
    add = parser.add_argument
    add("--chip", nargs="+", choices=CHIPS, default=list(CHIPS), help="what to compile for")
    add("--kernel", nargs="+", default=[], metavar="NAME", help="names or globs; by default all")
    add("--call", action="store_true", help="whole calls, with all that is around their kernels")
    add("--list", action="store_true", help="print the names of the kernels and stop")
    add("--tune", action="store_true", help="compare other block sizes, the fastest first")
    add("--peers", action="store_true", help="also the kernels of other libraries")
    add("--json", type=new_file, help="write the figures here, or in place of those that it has")
    add("--markdown", type=new_file, help="also write the tables as Markdown")


@dataclasses.dataclass(frozen=True)
class Kind:
    """What is measured: single kernels or whole calls.

    **Arguments:**

    - `choose`: a function that returns what some patterns name. It also gets whether kernels of
        other libraries are wanted.
    - `file`: the format of its figures in a file.
    - `tables`, `markdown`: how its rows are shown.
    """

    choose: Callable[[Sequence[str], bool], Sequence[Any]]
    file: RowFile
    tables: Callable[[Sequence[Any]], str]
    markdown: Callable[[Sequence[Any], dict[str, str]], str]

    @classmethod
    def of(cls, call: bool) -> "Kind":
        from . import calls, kernels  # which import JAX and Pallas

        if call:
            return cls(calls.choose, CALLS_FILE, report.call_tables, report.call_markdown)
        return cls(kernels.choose, FILE, report.tables, report.markdown)

    def ordered(self, rows: dict[tuple[str, str], Any], measured: Sequence[str] = ()) -> list[Any]:
        """The rows, ordered by name and then by chip. Names that are neither known nor `measured`
        are left out, as a file may hold some that are gone.
        """
        names = [x.name for x in self.choose([], True)]
        # Kernels of other block sizes have a name, but are not among all kernels.
        names, chips = list(dict.fromkeys([*names, *measured])), list(CHIPS)
        known = [key for key in rows if key[0] in names]
        known.sort(key=lambda key: (names.index(key[0]), chips.index(key[1])))
        return [rows[key] for key in known]

    def recorded(self, path: Path | None, found: dict[str, str]) -> dict[tuple[str, str], Any]:
        if path is None or not path.exists():
            return {}
        rows, before = self.file.read(path)
        if before != found:
            raise ValueError(f"{path} was recorded with {before}, not {found}; remove it first.")
        return {row.key: row for row in rows}


def run(args: argparse.Namespace) -> int:
    """Compiles, measures and reports.

    **Returns:** 1 if a kernel failed, else 0. **Raises:** `ValueError` for bad arguments.
    """
    from . import kernels  # which imports JAX and Pallas
    from .peers import NOT_MEASURED

    kind = Kind.of(args.call)
    names = _names(kind, args)
    if args.list:
        print("\n".join(names))
        return 0
    found = versions()
    old = kind.recorded(args.json, found)
    rows, failed = {}, []
    bar = progress_bar(len(names) * len(args.chip))
    for item in measure([(chip, names) for chip in args.chip], call=args.call):
        if not isinstance(item, str):
            rows[item.key] = item
            if args.json is not None:  # written after each row, so that a kill loses nothing
                kind.file.write(kind.ordered(old | rows, names), found, args.json)
            bar(" ".join(reversed(item.key)))
        else:
            failed.append(item)
            bar(item)
    print(", ".join(f"{name} {version}" for name, version in found.items()))
    print(_tuned(list(rows.values())) if args.tune else kind.tables(kind.ordered(rows, names)))
    if args.peers:
        for name in NOT_MEASURED:
            here = importlib.util.find_spec(name) is not None
            print(f"{name}: {'installed, but not measured here' if here else 'not installed'}")
    for message in failed:
        print(f"failed: {message}", file=sys.stderr)
    if args.markdown is not None:
        args.markdown.write_text(kind.markdown(kind.ordered(old | rows, names), found))
    # That other blocks do not fit into vector memory is what one wants to know.
    return 1 if any(not (args.tune and kernels.AT in message) for message in failed) else 0


def _names(kind: Kind, args: argparse.Namespace) -> list[str]:
    """The names of what is compiled.

    **Raises:** `ValueError` for flags that do not go together, and for a kernel of one block size.
    """
    chosen = kind.choose(args.kernel, args.peers)
    if not args.tune:
        return [x.name for x in chosen]
    from . import tune

    if args.call or args.peers or args.json is not None or args.markdown is not None:
        raise ValueError("--tune compares kernels, and goes with --kernel and --chip only.")
    return tune.names(chosen if args.kernel else [k for k in chosen if k.sized is not None])


def _tuned(rows: Sequence[Row]) -> str:
    from . import tune

    return report.aligned(tune.ranked(rows))


def versions() -> dict[str, str]:
    """The versions of what schedules depend on. **Raises:** `ValueError` without the compiler."""
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            "libtpu, which compiles for TPUs, is not installed: python -m pip install libtpu"
        )
    return {name: distributions.version(name) for name in ("jax", "libtpu")}


def measure(
    jobs: Sequence[tuple[str, Sequence[str]]], call: bool = False
) -> Iterator[Row | CallRow | str]:
    """Compiles kernels, or whole calls with `call`, by name, for chips.

    **Returns:** a row for each, or what failed and why.
    """
    for chip, names in jobs:
        left = list(names)
        while left:
            done = 0
            with tempfile.TemporaryDirectory() as folder:
                for item in _child(chip, left, Path(folder), call):
                    done += 1
                    yield item
            # A kernel on which the compiler ended the process is not tried again. The next ones are
            # compiled in a new process.
            left = left[done:]


def _child(
    chip: str, names: Sequence[str], folder: Path, call: bool
) -> Iterator[Row | CallRow | str]:
    from .schedule import PASSES

    flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    flags += " --xla_jf_dump_hlo_text=true" if call else ""
    # No code may look for the host of a TPU, and other processes may load the compiler meanwhile.
    environment = os.environ | {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_PLATFORMS": "cpu",
        "LIBTPU_INIT_ARGS": f"{flags} --xla_jf_dump_llo_pass_label_regex={PASSES}",
        "TPU_SKIP_MDS_QUERY": "1",
    }
    environment.pop("XLA_FLAGS", None)  # the flags of this process are for its own device
    job = {"chip": chip, "names": names, "call": call, "folder": str(folder)}
    make = (CALLS_FILE if call else FILE).make
    for done, item in enumerate(results(CHILD, job, environment)):
        if not isinstance(item, End):
            failed = f"{item['failed']} on {chip}: {item['why']}" if "failed" in item else ""
            yield failed or make(item["row"])
        elif done < len(names):
            yield f"{names[done]} on {chip}: {item}"
