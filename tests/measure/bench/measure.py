"""Measures the figures of each kind of case.

Times are the CPU times of this process if it runs on one core, and elapsed times if it runs on
several. Programs run in turn, forwards and backwards. A ratio is the median of the ratios within
each round: what disturbs one program in a round disturbs the other.
"""

import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from eqattn._config.metadata import AttentionMetadata
from eqattn._info import blocks_of
from eqattn.strategies import Blockwise

from . import balance, bits, decode, lists, peers, ring, rows, statistics
from .cases import Case, DIM, HEADS, Row
from .timing import ratios, rounds_of


# A program that needs more bytes of temporary memory than this is not run. The bound, chosen by
# trial, keeps a library with quadratic memory from taking all that the machine has.
_LARGEST = 3 * 2**30
# A library is reported as wrong if its largest difference, relative to the largest entry, exceeds
# this. The bounds are far above rounding, so that they tell another formula from another order.
_WRONG = {"float32": 1e-3, "bfloat16": 3e-2}


def _time(case: Case, rounds: int, names: Sequence[str]) -> Iterator[Row]:
    inputs = peers.draw(case)
    programs, notes = {}, []
    for name in ("eqattn", *names):
        try:
            program = peers.program(name, case, inputs)
        except Exception as e:  # another library's limits are not ours
            if name == "eqattn":
                raise
            notes.append(f"{name} fails: {str(e).splitlines()[0][:80] if str(e) else repr(e)}")
            continue
        if (program.temporary or 0) > _LARGEST:
            notes.append(f"{name} needs {program.temporary / 2**30:.1f} GiB")
            continue
        programs[name] = program
    notes += _wrong(case, programs)
    reference = case.reference if case.reference in programs else "jax.nn"
    if reference not in programs:
        reference = "eqattn"
    calls = {name: p.call for name, p in programs.items()}
    rare = [n for n in calls if n not in ("eqattn", reference)]
    times = rounds_of(calls, rounds, rare)
    medians, quartiles = ratios(times, reference)
    milliseconds = {n: float(np.nanmedian(x)) * 1e3 for n, x in times.items()}
    temporary = {n: p.temporary / 2**20 for n, p in programs.items() if p.temporary is not None}
    yield case.row(f"time / {reference}", medians, quartiles=quartiles, note="; ".join(notes))
    yield case.row("time ms", milliseconds)
    yield case.row("temp MiB", temporary)


def _wrong(case: Case, programs: dict[str, peers.Program]) -> list[str]:
    """Runs every program twice, and says which of them do not compute what eqattn does."""
    results = {}
    for name, program in programs.items():
        program.call()
        results[name] = program.arrays(program.call())
    wrong = []
    for name, arrays in results.items():
        pairs = zip(results["eqattn"], arrays)
        error = max(float(abs(a - b).max() / abs(a).max()) for a, b in pairs)
        if not error <= _WRONG[case.dtype]:
            wrong.append(f"{name} is WRONG by {error:.2g}")
    return wrong


def _dots(case: Case, rounds: int) -> Iterator[Row]:
    inputs = peers.draw(case)
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs[:3]]
    tiling, _ = blocks_of(Blockwise(AttentionMetadata()), avals[0], avals[1], avals[2], None)
    dots = peers.dots_program(case, inputs, tiling.block_q, tiling.block_k)
    calls = {"eqattn": peers.program("eqattn", case, inputs).call, "dots": dots.call}
    yield from _share(case, calls, rounds, "share of dots")


def _share(case: Case, calls: dict, rounds: int, figure: str) -> Iterator[Row]:
    for call in calls.values():
        call()
    medians, quartiles = ratios(rounds_of(calls, rounds), "dots")
    share = {n: 1 / x for n, x in medians.items()}
    around = {n: [1 / high, 1 / low] for n, (low, high) in quartiles.items()}
    yield case.row(figure, share, quartiles=around)


def _dropout(case: Case, rounds: int) -> Iterator[Row]:
    inputs = peers.draw(case)
    with_it = peers.dropout_program(case, inputs, 0.1)
    calls = {"eqattn": with_it.call, "none": peers.program("eqattn", case, inputs).call}
    for call in calls.values():
        call()
    medians, quartiles = ratios(rounds_of(calls, rounds), "none")
    del medians["none"], quartiles["none"]
    yield case.row("time / no dropout", medians, quartiles=quartiles)


def _scaling(case: Case, rounds: int) -> Iterator[Row]:
    sizes = [case.tokens * 2**i for i in range(4)]
    programs = {}
    for tokens in sizes:
        smaller = dataclasses.replace(case, tokens=tokens)
        programs[str(tokens)] = peers.program("eqattn", smaller, peers.draw(smaller))
        programs[str(tokens)].call()
    times = rounds_of({n: p.call for n, p in programs.items()}, max(rounds // 3, 3))
    each = np.stack([times[str(t)] for t in sizes])
    slopes = np.polyfit(np.log(sizes), np.log(each), 1)[0]
    low, middle, high = (float(x) for x in np.percentile(slopes, (25, 50, 75)))
    yield case.row("exponent of time", {"eqattn": middle}, quartiles={"eqattn": [low, high]})
    temporary = [programs[str(t)].temporary for t in sizes]
    slope = float(np.polyfit(np.log(sizes), np.log(temporary), 1)[0])
    yield case.row("exponent of memory", {"eqattn": slope})


def _compile(case: Case, rounds: int, names: Sequence[str]) -> Iterator[Row]:
    """Measures tracing, lowering and compiling with empty caches. A first run, which is not
    measured, imports what that needs.
    """

    def once(name: str, tokens: int) -> float:
        smaller = dataclasses.replace(case, tokens=tokens)
        shape = (1, tokens, HEADS, DIM)
        jax.clear_caches()
        start = time.process_time()
        function, n = peers.jitted(peers._CALLS[name](smaller), case.backward)
        function.lower(*[jax.ShapeDtypeStruct(shape, jnp.float32)] * n).compile()
        return time.process_time() - start

    calls = {"eqattn": ("eqattn", case.tokens), "at 4 T": ("eqattn", 4 * case.tokens)}
    calls |= {n: (n, case.tokens) for n in names if n in peers._CALLS and n != "eqattn"}
    for name in list(calls):
        try:
            once(*calls[name])
        except Exception:
            del calls[name]
    several = range(max(rounds // 3, 3))
    samples = [{name: once(*of) for name, of in calls.items()} for _ in several]
    times = {name: np.array([s[name] for s in samples]) for name in calls}
    if "jax.nn" in times:
        medians, quartiles = ratios({n: x for n, x in times.items() if n != "at 4 T"}, "jax.nn")
        yield case.row("trace+compile / jax.nn", medians, quartiles=quartiles)
    seconds = {n: float(np.median(x)) for n, x in times.items() if n != "at 4 T"}
    yield case.row("trace+compile s", seconds)
    medians, quartiles = ratios(times, "eqattn")
    grown = {"eqattn": medians["at 4 T"]}
    yield case.row("at 4 T / at T", grown, quartiles={"eqattn": quartiles["at 4 T"]})


# Garbage that the import of equinox leaves is collected before eqattn is imported. Else the second
# import would trigger that collection, and be charged for it.
_IMPORT = """
import gc
import time
start = time.process_time()
import equinox
middle = time.process_time()
gc.collect()
again = time.process_time()
import eqattn
print(1 + (time.process_time() - again) / (middle - start))
"""


def _import(case: Case, rounds: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "PYTHONPYCACHEPREFIX": folder}
        env.pop("PYTHONDONTWRITEBYTECODE", None)

        def once() -> float:
            run = subprocess.run(
                [sys.executable, "-c", _IMPORT], capture_output=True, check=True, text=True, env=env
            )
            return float(run.stdout)

        once()  # writes the bytecode, which an installed package has
        times = [once() for _ in range(max(rounds // 3, 3))]
    low, middle, high = np.percentile(times, (25, 50, 75))
    spread = {"eqattn": [float(low), float(high)]}
    yield case.row("time / equinox", {"eqattn": float(middle)}, quartiles=spread)


def _accuracy(case: Case, rounds: int, names: Sequence[str]) -> Iterator[Row]:
    from .accuracy import rows

    yield from rows(case, names)


def measure(case: Case, rounds: int, names: Sequence[str]) -> Iterator[Row]:
    """Runs an experiment.

    **Arguments:**

    - `case`: which experiment to run.
    - `rounds`: how often the programs are run in turn.
    - `names`: the other libraries to compare with.
    """
    among_libraries = {"time": _time, "compile": _compile, "accuracy": _accuracy}
    alone = {"dots": _dots, "dropout": _dropout, "scaling": _scaling, "import": _import}
    others = alone | decode.EXPERIMENTS | lists.EXPERIMENTS | ring.EXPERIMENTS
    others |= statistics.EXPERIMENTS | bits.EXPERIMENTS | balance.EXPERIMENTS
    others |= rows.EXPERIMENTS
    if case.kind in among_libraries:
        yield from among_libraries[case.kind](case, rounds, names)
    else:
        yield from others[case.kind](case, rounds)


def pin(core: int | None, cores: int = 1) -> None:
    """Keeps this process on one core, by default the last one, or on several cores. It does nothing
    on systems that cannot do so.
    """
    if hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        chosen = allowed[-cores:] if core is None or cores > 1 else [core]
        os.sched_setaffinity(0, set(chosen))
