"""`python -m eqattn._tools.gpu_run.child` runs on the device, and prints what it found, as JSON.

Before each piece of work it prints a name, as a kernel that was never run before may crash the
whole process. Then the parent begins another process without that piece. Conformance runs in
several processes at once, each with a share of the cases.
"""

import concurrent.futures
import contextlib
import dataclasses
import importlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..bench.timing import ratios, rounds_of
from . import calls
from .cases import (
    BACKWARD,
    BLOCK,
    BY_XLA,
    Case,
    CEILING,
    CONFORMANCE,
    FORWARD,
    PEERS,
    STREAM,
    TEMPORARY,
)


_THREADS = 8  # that trace and compile: the compiler runs beside Python, which traces one at a time
_EVERY = 4  # One of so many cases of the pairwise array is judged as XLA code.
_END = 160  # The characters that are kept of each end of a long message.
_WRONG = 3e-2  # Of the relative error of an array: above any rounding to 8 bits of mantissa.


@dataclasses.dataclass
class Job:
    """What the process is to do.

    **Arguments:**

    - `tasks`: `CEILING`, `CONFORMANCE`, and names of `cases`, in this order.
    - `peers`: the other libraries.
    - `skip`: pieces of work that are left out.
    - `rehearsed`: whether all is small, on a CPU.
    - `until`: the time at which no further piece is begun.
    - `tests`: the folder of the conformance matrix.
    - `part`, `parts`: the share of its cases: every one of so many, from this one on.
    """

    tasks: list[str]
    cases: list[Case]
    peers: list[str]
    skip: list[str]
    rounds: int
    rehearsed: bool
    until: float
    tests: str
    part: int = 0
    parts: int = 1

    @property
    def late(self) -> bool:
        return time.time() > self.until

    @contextlib.contextmanager
    def piece(self, name: str) -> Iterator[bool]:
        """Announces a piece of work. **Returns:** whether it is to be done."""
        left, late = name not in self.skip, self.late
        wanted = left and not late
        if left and late:
            say(late=name)
        if wanted:
            say(begin=name)
        yield wanted
        if wanted:
            say(end=name)


_saying = threading.Lock()  # `print` writes the text and the end of the line one after the other.


def say(**item: Any) -> None:
    """Prints an item as a line of its own, from any thread."""
    with _saying:
        print(json.dumps(item), flush=True)


def device() -> dict[str, str]:
    """The device, and what JAX says of its driver."""
    found = jax.devices()[0]
    return dict(platform=found.platform, device=found.device_kind, backend=jax.default_backend())


def check_alive(error: Exception | None = None) -> None:
    """Ends the process if the device no longer answers, or an error says that it failed. A fault of
    one kernel spoils all that comes after it.
    """
    try:
        if "CUDA_ERROR" not in str(error):
            jax.block_until_ready(jnp.ones(8) + 1)
            return
    except Exception as e:
        error = e
    assert error is not None
    print(f"the device no longer answers: {short(error)}", file=sys.stderr, flush=True)
    os._exit(1)  # What would run at the exit may hang, and says more in place of this line.


def short(e: Exception) -> str:
    """An error in one line: the beginning and the end of a long one, and CUDA's names of errors
    between them.
    """
    text = " ".join(f"{type(e).__name__}: {e}".split())
    if len(text) <= 2 * _END:
        return text
    ends = text[:_END], text[-_END:]
    codes = dict.fromkeys(re.findall(r"CUDA_ERROR_\w+", text))
    between = [code for code in codes if not any(code in x for x in ends)]
    return " ... ".join([ends[0], *between, ends[1]])


def judged(job: Job, cases: Any) -> dict[str, Any]:
    """The process's share of the conformance cases, by name: those of kernels, and then some of the
    pairwise array as XLA code.
    """
    kernels = cases.of_the_gpu(2)
    targets = ("blockwise", 1), ("ragged", 1)
    others = [case for case in cases.covering(2) if case["target"] in targets]
    # Hessian-vector products of narrow numbers have no bound, as docs/pages/numerics.md says.
    known = lambda case: case["transform"] != "hvp" or case["dtype"] in ("float32", "float64")
    others = list(filter(known, others))[::_EVERY]
    most = 1 if job.rehearsed else None
    found = [(cases.name_of(case), case) for case in kernels[:most]]
    found += [(f"{BY_XLA}{cases.name_of(case)}", case) for case in others[:most]]
    return dict(found[job.part :: job.parts])


def conformance(job: Job) -> None:
    """Judges cases of the conformance matrix by its error bound, on the device. They run one after
    the other, so a fault has one culprit.
    """
    sys.path.insert(0, job.tests)
    cases = importlib.import_module("matrix.cases")
    matrix = importlib.import_module("matrix.test_conformance")
    for name, case in judged(job, cases).items():
        with job.piece(name) as wanted:
            if not wanted:
                continue
            try:
                matrix.check(case)
                say(check=name)
            except Exception as e:
                say(check=name, failed=short(e))
                check_alive(e)


def ceiling(job: Job) -> None:
    """Measures what the chip does at best: a product of matrices, and a copy."""
    n, m = (256, 2**16) if job.rehearsed else (8192, 2**29)
    a, x = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16), jnp.ones(m, jnp.float32)
    product, copy = jax.jit(lambda a: a @ a), jax.jit(lambda x: x + 1)
    runs = {"product": lambda: (product(a),), "copy": lambda: (copy(x),)}
    for run in runs.values():
        calls.wait(run())
    times = rounds_of(runs, job.rounds, wall=True, wait=calls.wait)
    found = {name: float(np.median(t)) for name, t in times.items()}
    case = Case(CEILING)
    say_row(case, "product TFLOP/s", {"eqattn": 2 * n**3 / found["product"] / 1e12})
    say_row(case, "copy TB/s", {"eqattn": 2 * x.nbytes / found["copy"] / 1e12})


def say_row(case: Case, figure: str, values: Mapping[str, float], **kwargs: Any) -> None:
    say(row=case.row(figure, values, **kwargs).to_dict())


Passes = dict[str, Callable[[], tuple]]


class Measurement:
    """All libraries' programs of a case.

    `runs` has for each pass those of the libraries, which start it and return its arrays.
    """

    def __init__(self, case: Case, job: Job):
        self.case, self.job = case, job
        args = calls.draw(case)
        q, k, v, *more = args
        self.args = (q, calls.cached(case, k), calls.cached(case, v), *more)
        self.bytes = sum(x.nbytes for x in jax.tree.leaves(self.args[1:3]))
        plain = [calls.plain(x) for x in self.args[1:3]]
        self.exact = [] if case.dropout else calls.exact(case, (q, *plain, *more))
        self.names = [FORWARD] if case.keys else [FORWARD, BACKWARD]
        self.runs: dict[str, Passes] = {name: {} for name in self.names}
        self.temporary: dict[str, dict[str, float]] = {name: {} for name in self.names}
        self.errors: dict[str, float] = {}
        self.notes: list[str] = []

    def compiled(self, call: Callable, backward: bool) -> tuple[Callable[[], tuple], float | None]:
        """One of a JAX library's programs, and the MiB of its temporary memory."""
        q, k, v, g, *more = self.args

        def both(q, k, v, g, *more):
            out, pull = jax.vjp(lambda q, k, v: call(q, k, v, *more), q, k, v)
            return out, *pull(g)

        run = jax.jit(both if backward else lambda q, k, v, g, *more: (call(q, k, v, *more),))
        program = run.lower(q, k, v, g, *more).compile()
        memory: Any = program.memory_analysis()
        size = None if memory is None else memory.temp_size_in_bytes / 2**20
        return lambda: program(*self.args), size

    def programs(self, name: str) -> list[tuple[Callable[[], tuple], float | None]] | None:
        """Those of a library for each pass; None where it has no such call."""
        rehearsed = self.job.rehearsed
        if name.startswith("torch"):
            found = calls.torch_calls(name, self.case, self.args, rehearsed)
            return None if found is None else [(run, None) for run in found]
        case = self.case.plain if name == "plain" else self.case
        call = calls.call_of("eqattn" if name == "plain" else name, case, rehearsed)
        if call is None:
            return None
        return [self.compiled(call, bool(i)) for i in range(len(self.names))]

    def prepare(self, names: list[str]) -> None:
        """Compiles the programs of libraries, runs each once and judges what it returns."""
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            made = {name: pool.submit(self.programs, name) for name in names}
        for name, future in made.items():
            with self.job.piece(f"{self.case.name}: {name}") as wanted:
                try:
                    programs = future.result() if wanted else None
                    if programs is not None:
                        self.add(name, programs)
                except Exception as e:
                    self.notes.append(f"{name} fails: {short(e)}")
                    check_alive()

    def add(self, name: str, programs: list) -> None:
        outputs: tuple = ()
        for run, _ in programs:
            outputs = run()
            calls.wait(outputs)
        if self.exact and name != "plain":
            error = max(
                float(np.linalg.norm(x - y) / np.linalg.norm(y))
                for x, y in zip(calls.head_of(self.case, outputs), self.exact)
            )
            self.errors[name] = error
            if not error <= _WRONG:
                self.notes.append(f"{name} is WRONG by {error:.2g}")
        for figure, (run, size) in zip(self.names, programs):
            self.runs[figure][name] = run
            if size is not None and name != "plain":
                self.temporary[figure][name] = size

    def rows(self) -> None:
        """Times the programs of all passes in turn, and says what they take."""
        case, rare = self.case, [name for name in PEERS if name != "cuDNN"]
        programs = {(f, name): run for f, runs in self.runs.items() for name, run in runs.items()}
        found = rounds_of(
            {str(at): run for at, run in programs.items()},
            self.job.rounds,
            [str(at) for at in programs if at[1] in rare],
            wall=True,
            wait=calls.wait,
        )
        times = {f: {n: found[str((f, n))] for n in runs} for f, runs in self.runs.items()}
        forward = times.get(FORWARD, {})
        if BACKWARD in times:  # both passes were timed
            times[BACKWARD] = {name: x - forward[name] for name, x in times[BACKWARD].items()}
        note = "; ".join(self.notes)
        for figure, found in times.items():
            self.say_rates(figure, found, note)
            note = ""
        for figure, found in self.temporary.items():
            if found:
                say_row(case, TEMPORARY[figure], found)
        if self.errors:
            say_row(case, "error", self.errors)
        if {"plain", "eqattn"} <= forward.keys():
            share = visited(case.plain) / visited(case)
            medians, quartiles = ratios({n: forward[n] for n in ("eqattn", "plain")}, "plain")
            scaled = {"eqattn": [share * x for x in quartiles["eqattn"]]}
            say_row(case, BLOCK, {"eqattn": share * medians["eqattn"]}, quartiles=scaled)

    def say_rates(self, figure: str, times: dict[str, np.ndarray], note: str) -> None:
        """Says how fast a pass is, from seconds, and these."""
        case, amount = self.case, self.case.operations() / 1e12
        if case.keys:
            figure, amount = STREAM, self.bytes / 1e12
        elif figure == BACKWARD:
            amount = 2.5 * amount
        quantiles = {n: np.nanpercentile(x, (75, 50, 25)) for n, x in times.items()}
        quantiles = {n: x.tolist() for n, x in quantiles.items() if n != "plain" and (x > 0).all()}
        rates = {n: [amount / t for t in x] for n, x in quantiles.items()}
        quartiles = {n: [low, high] for n, (low, _, high) in rates.items()}
        say_row(case, figure, {n: x[1] for n, x in rates.items()}, quartiles=quartiles, note=note)
        pass_ = "step" if case.keys else figure.split()[0]
        say_row(case, f"{pass_} ms", {n: 1e3 * x[1] for n, x in quantiles.items()})


def visited(case: Case) -> float:
    """The share of blocks of 128 queries and keys that a case visits."""
    from ... import Causal, Segments, SlidingWindow

    mask = SlidingWindow(case.window - 1, 0) if case.window else Causal()
    if case.segments:
        mask = Causal() & Segments(np.asarray(calls.draw(dataclasses.replace(case, batch=1))[4]))
    return 1 - float(np.max(mask.sparsity(case.tokens, case.tokens, batch_shape=(1,)).empty))


def measure(case: Case, job: Job) -> None:
    measurement = Measurement(case, job)
    names = ["eqattn", *["plain"] * case.featured, *job.peers]
    measurement.prepare([x for x in names if f"{case.name}: {x}" not in job.skip])
    with job.piece(f"{case.name}: times") as wanted:
        if wanted:
            measurement.rows()


def main() -> None:
    """Reads the job, a JSON object, from standard input."""
    fields = json.load(sys.stdin)
    job = Job(**fields | {"cases": [Case.from_dict(x) for x in fields["cases"]]})
    found = device()
    say(machine=found)
    if not job.rehearsed and "NVIDIA" not in found["device"]:
        return
    named: dict[str, Any] = {CONFORMANCE: conformance, CEILING: ceiling}
    cases = {case.name: case for case in job.cases}
    for task in job.tasks:
        with job.piece(task) as wanted:
            if wanted and task in named:
                named[task](job)
            elif wanted:
                measure(cases[task], job)
        say(done=task)


if __name__ == "__main__":
    main()
