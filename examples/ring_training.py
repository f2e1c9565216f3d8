"""Trains the language model with every sequence spread over a ring of devices, three times:
on one device with `Blockwise`, on a ring in one process, and on a ring over several processes.

    python examples/ring_training.py                    # 8 virtual CPU devices, a few minutes
    python examples/ring_training.py --processes 4 --context 4096 --layout contiguous
    python examples/ring_training.py --quick            # a tiny model for a few seconds

The losses are those of one device, to rounding: they are printed and drawn, one curve over the
other. The model is that of language_model.py, unchanged; only the strategy differs. On real
machines, start one process per host yourself and leave out what `worker` does before it trains
but `jax.distributed.initialize()`: see the docs, "Ring".
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


# Where it runs ---------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def launch(options: argparse.Namespace, processes: int, devices: int) -> list[float]:
    """Trains in `processes` new processes, with `devices` virtual devices in all.

    **Returns:** the loss of each step.

    **Raises:** `RuntimeError` with the end of its output if one fails or is late. Then all of them
    are stopped: a process whose peer has died would only wait for it.
    """
    port = free_port()
    out = options.out / f"losses-{processes}x{devices // processes}.json"
    flags = os.environ.get("XLA_FLAGS", "")
    flags += f" --xla_force_host_platform_device_count={devices // processes}"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    arguments = [f"--{k}={getattr(options, k)}" for k in ("context", "steps", "layout", "width")]
    command = [sys.executable, __file__, *arguments, "--out", str(out)]
    children = []
    for rank in range(processes):
        worker = [*command, "--worker", str(rank), str(processes), str(port)]
        log = open(options.out / f"log-{processes}-{rank}.txt", "w+")
        quiet = dict(stdout=log, stderr=subprocess.STDOUT) if rank else dict(stderr=None)
        children.append((subprocess.Popen(worker, env=env, **quiet), log))
    deadline = time.monotonic() + options.deadline
    try:
        while any(child.poll() != 0 for child, _ in children):
            failed = [i for i, (child, _) in enumerate(children) if child.poll()]
            if failed or time.monotonic() > deadline:
                rank = failed[0] if failed else 0
                children[rank][1].seek(0)
                what = "failed" if failed else f"was not ready after {options.deadline:.0f} s"
                tail = children[rank][1].read()[-2000:]
                raise RuntimeError(f"Process {rank} of {processes} {what}.\n{tail}")
            time.sleep(0.1)
    finally:
        for child, log in children:
            child.kill()
            child.wait()
            log.close()
    return json.loads(out.read_text())


def worker(options: argparse.Namespace) -> None:
    """One process of a run."""
    import jax

    rank, processes, port = options.worker
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank, initialization_timeout=60)
    losses = train(options, quiet=rank > 0)
    if rank == 0:
        options.out.write_text(json.dumps(losses))


# What it does ----------------------------------------------------------------------------------


def train(options: argparse.Namespace, quiet: bool) -> list[float]:
    """Trains on all devices of all processes. **Returns:** the loss of each step."""
    import equinox as eqx
    import jax
    import language_model as lm
    import optax
    from _run import Config
    from _text import read_documents, split, windows_at
    from jax.sharding import NamedSharding, PartitionSpec as P
    from tqdm import tqdm

    from eqattn import AttentionMetadata, Blockwise, Contiguous, Ring, Zigzag
    from eqattn.strategies import ring_mesh

    n = jax.device_count()
    mesh = ring_mesh("sp")
    layout = Zigzag() if options.layout == "zigzag" else Contiguous()
    metadata = AttentionMetadata(sequence_axis_name="sp")
    strategy = Blockwise(metadata) if n == 1 else Ring(metadata, layout=layout)
    config = Config(
        context=options.context, batch=2, layers=2, width=options.width, steps=options.steps
    ).complete()
    text, _ = split(read_documents(None))
    optimiser = lm.make_optimiser(config)

    def spread(x: np.ndarray) -> Any:
        """A host array `[..., tokens]`, in the order of the layout, over the ring."""
        x = layout.permute(x, n, axis=-1)
        sharding = NamedSharding(mesh, P(*[None] * (x.ndim - 1), "sp"))
        return jax.make_array_from_callback(x.shape, sharding, lambda piece: x[piece])

    def loss_of(model, tokens, labels, positions):
        logits = jax.vmap(lambda row: model(row, strategy, positions))(tokens)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean() / np.log(2)

    @eqx.filter_jit(donate="all-except-first")
    def step(data, state):
        loss, gradients = eqx.filter_value_and_grad(loss_of)(state.model, *data)
        updates, moments = optimiser.update(gradients, state.optimiser, state.model)
        return lm.State(eqx.apply_updates(state.model, updates), moments), loss

    with jax.set_mesh(mesh):
        everywhere = NamedSharding(mesh, P())
        create = jax.jit(lambda: lm.create_state(config), out_shardings=everywhere)
        state = create()
        positions = spread(np.arange(config.context, dtype=np.int32))
        losses = []
        bar = tqdm(range(config.steps), unit="step", disable=quiet, dynamic_ncols=True)
        bar.set_description(f"{jax.process_count()} x {jax.local_device_count()} devices")
        for done in bar:
            rng = np.random.default_rng((config.seed, done))
            starts = rng.integers(len(text) - config.context, size=config.batch)
            windows = windows_at(text, starts, config.context)
            tokens, labels = windows[:, :-1], windows[:, 1:].astype(np.int32)
            state, loss = step((spread(tokens), spread(labels), positions), state)
            losses.append(float(loss))
            bar.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
    return losses


def draw(path: Path, curves: dict[str, list[float]]) -> None:
    """The losses of all runs, and their differences from the first."""
    from matplotlib.figure import Figure  # without pyplot it needs no display

    figure = Figure(figsize=(7, 5), layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    first = np.array(next(iter(curves.values())))
    for i, (name, losses) in enumerate(curves.items()):
        above.plot(losses, label=name, lw=6 - 2 * i)
        below.plot(np.array(losses) - first)
    above.set(ylabel="bits per byte")
    below.set(xlabel="step", ylabel="difference")
    above.legend()
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--devices", type=int, default=8, help="virtual devices in all (default %(default)s)")
    add("--processes", type=int, default=2, help="processes of the last run (default %(default)s)")
    add("--context", type=int, default=1024, help="tokens of a sequence (default %(default)s)")
    add("--steps", type=int, default=40, help="training steps (default %(default)s)")
    add("--width", type=int, default=128, help="features of a token (default %(default)s)")
    add("--layout", choices=["zigzag", "contiguous"], default="zigzag",
        help="which tokens each device holds (default %(default)s)")  # fmt: skip
    add("--deadline", type=float, default=1800, help="seconds for each run (default %(default)s)")
    add("--out", type=Path, default=Path("runs/ring_training"), help="folder of the results")
    add("--quick", action="store_true", help="a tiny model for a few seconds")
    add("--worker", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker is not None:
        worker(options)
        return 0
    if options.quick:
        options.context, options.steps, options.width = 64, 6, 32
    pieces = 2 * options.devices
    if options.processes < 1 or options.devices % options.processes:
        parser.error(f"--devices {options.devices} is no multiple of --processes.")
    if options.context % pieces:
        parser.error(f"--context {options.context} is no multiple of {pieces}, twice --devices.")
    options.out.mkdir(parents=True, exist_ok=True)
    runs = {
        "one device": (1, 1),
        f"a ring of {options.devices}": (1, options.devices),
        f"the ring over {options.processes} processes": (options.processes, options.devices),
    }
    curves = {name: launch(options, *sizes) for name, sizes in runs.items()}
    draw(options.out / "loss.png", curves)
    first, *_ = curves.values()
    for name, losses in curves.items():
        apart = max(abs(a - b) for a, b in zip(losses, first))
        print(
            f"{name}: {losses[0]:.4f} to {losses[-1]:.4f} bits per byte, "
            f"at most {apart:.1e} from one device"
        )
    print(f"written: {options.out / 'loss.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
