"""What the compiler of a TPU makes of a ring, without a TPU: it is compiled for a named topology,
and the moves are read off the scheduled program.

    python tests/unit/kernels/_tpu_schedule.py '{"topology": "v5e:4x4", "tokens": 4096}' ...

prints one JSON object for each case; without a case, the table of docs/pages/ring.md.
"""

import dataclasses
import json
import math
import os
import re
import sys


KERNELS = re.compile(r'custom_call_target="(tpu_custom_call|mosaic_gpu_v2|__gpu\$xla.gpu.triton)"')
COLLECTIVES = r"(all-gather|all-reduce|all-to-all|reduce-scatter|collective-broadcast)(-start)?"


@dataclasses.dataclass(frozen=True)
class Case:
    """`tokens` are those of one device. `gradient`: output and gradients of query, key, value.
    `platform`: `"auto"` runs each hop by the kernels. `dp`, `tp`: over how many devices batch and
    heads are sharded; the others are the ring, or there is none. `group`: so many of them are one
    place of the ring, and exchange heads. `hides`: whether the compiler of GPUs is told
    to hide moves. By default it decides by the chip. `small`: whether blocks are small, so that
    kernels are compiled fast. By default the lowering chooses them.
    """

    topology: str = "v5e:4x4"
    layout: str = "Contiguous"
    tokens: int = 512
    window: int | None = None
    gradient: bool = True
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    platform: str = "auto"
    dp: int = 1
    tp: int = 1
    group: int = 1
    hides: bool | None = None
    small: bool = False


@dataclasses.dataclass(frozen=True)
class Move:
    """A collective permute of `nbytes` that each device runs `times`. `hidden`: it is asynchronous,
    and between its start and its end stands a kernel, or a loop that multiplies matrices.
    """

    dtype: str
    nbytes: int
    times: int
    in_loop: bool
    hidden: bool
    backward: bool


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    text: str

    @property
    def kernel(self) -> bool:
        return self.opcode == "custom-call" and KERNELS.search(self.text) is not None

    def called(self, role: str = r"\w+") -> list[str]:
        found = re.findall(rf"\b{role}=\{{?(%[\w.\-]+(?:, %[\w.\-]+)*)", self.text)
        return [name.strip(" %") for names in found for name in names.split(",")]


def read(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """The computations of a scheduled program, in the order of the schedule, and the entry."""
    assert "is_scheduled=true" in text.split("\n", 1)[0]
    computations, entry, current = {}, "", []
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%([\w.\-]+) \(.*\{$", line)
        if head:
            computations[head[2]] = current = []
            entry = head[2] if head[1] else entry
            continue
        found = re.match(r"\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][a-z\d\-]*)\((.*)", line)
        if found:
            name, kind, opcode, rest = found.groups()
            operands = re.findall(r"%([\w.\-]+)", rest.split(")", 1)[0])
            current.append(Instruction(name, kind, opcode, tuple(operands), line))
    return computations, entry


class Schedule:
    def __init__(self, text: str):
        self.computations, self.entry = read(text)
        everything = [i for body in self.computations.values() for i in body]
        self.named = {i.name: i for i in everything}
        self.exchanges = [i for i in everything if i.opcode.removesuffix("-start") == "all-to-all"]
        self.other_collectives = [
            i.opcode
            for i in everything
            if re.fullmatch(COLLECTIVES, i.opcode) and i not in self.exchanges
        ]
        self.kernels = sum(i.kernel for i in everything)
        self.multiplies = self._containing({"convolution", "dot"})
        self.moving = self._containing({"collective-permute", "collective-permute-start"})
        self.moves: list[Move] = []
        self._visit(self.entry, 1)

    def _containing(self, opcodes: set[str]) -> set[str]:
        """The computations that run one of the opcodes, themselves or in what they call."""
        new = {n for n, body in self.computations.items() if any(i.opcode in opcodes for i in body)}
        found: set[str] = set()
        while new - found:
            found |= new
            new = {
                n
                for n, body in self.computations.items()
                if any(found & {*i.called()} for i in body)
            }
        return found

    def exchanged(self) -> list[tuple[str, int]]:
        """Dtype and bytes of what each device puts into each all-to-all, its own share too."""
        return [_array(self.named[x].type) for i in self.exchanges for x in i.operands[:1]]

    def _constant(self, name: str) -> int:
        at = self.named[name]
        while at.opcode == "copy":
            at = self.named[at.operands[0]]
        return int(re.search(r" constant\((-?\d+)\)", at.text)[1])

    def _trips(self, loop: Instruction) -> int:
        """Of a loop that counts up by one to a constant, as `lax.scan` makes them."""
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.text):
            return int(known[1])
        condition = self.computations[loop.called("condition")[0]]
        (test,) = [i for i in condition if i.opcode == "compare"]
        assert "direction=LT" in test.text, test.text
        start = self.named[loop.operands[0]].operands[0]
        return self._constant(test.operands[1]) - self._constant(start)

    def _visit(self, computation: str, times: int) -> None:
        body = self.computations[computation]
        for at, instruction in enumerate(body):
            if instruction.opcode.removesuffix("-start") == "collective-permute":
                self.moves += self._moved(body, at, times, computation != self.entry)
            called = self.moving & {*instruction.called()}
            if called:
                assert instruction.opcode == "while", instruction.text
                self._visit(*called, times * self._trips(instruction))

    def _moved(self, body: list[Instruction], at: int, times: int, in_loop: bool) -> list[Move]:
        start, hidden = body[at], False
        if start.opcode.endswith("-start") and '"is_sync":true' not in start.text:
            (end,) = [
                i
                for i, other in enumerate(body)
                if other.opcode == "collective-permute-done" and start.name in other.operands
            ]
            hidden = any(
                other.kernel
                or (other.opcode == "while" and self.multiplies & {*other.called("body")})
                for other in body[at:end]
            )
        moves = []
        for operand in start.operands:
            dtype, nbytes = _array(self.named[operand].type)
            backward = "transpose(" in start.text
            moves.append(Move(dtype, nbytes, times, in_loop, hidden, backward))
        return moves


def _array(kind: str) -> tuple[str, int]:
    """Dtype and bytes of an array type."""
    dtype, shape = re.match(r"(\w+)\[([\d,]*)\]", kind).groups()
    size = math.prod(int(n) for n in shape.split(",") if n)
    return dtype, size * int(re.sub(r"\D", "", dtype)) // 8


def lowered(case: Case, devices, platform: str):
    """A case lowered for devices, and how many of them are in its ring."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

    import eqattn
    from eqattn import attention, AttentionMetadata, Causal, Ring, ring_mesh, SlidingWindow

    mesh, n = ring_mesh("sp", devices=devices), len(devices) // (case.dp * case.tp)
    if n < len(devices) or case.group > 1:  # pieces of a path through neighbours exchange heads
        shape = (case.dp, n // case.group, case.group, case.tp)
        names, kinds = ("dp", "sp", "heads", "tp"), (AxisType.Auto,) * 4
        mesh = Mesh(np.reshape(mesh.devices, shape), names, axis_types=kinds)
    spec = P("dp", ("sp", "heads"), "tp") if len(mesh.axis_names) > 1 else P(None, "sp")
    sharding = NamedSharding(mesh, spec)
    query, key_, value = (
        jax.ShapeDtypeStruct(
            (case.dp, case.tokens * n, heads, case.dim), jnp.bfloat16, sharding=sharding
        )
        for heads in (case.heads, case.kv_heads, case.kv_heads)
    )
    mask = Causal() if case.window is None else Causal() & SlidingWindow(case.window, 0)
    sizes = dict(blocksize_q=32, blocksize_k=128) if case.small else {}
    metadata = AttentionMetadata(runtime_dtype=jnp.bfloat16, platform=case.platform, **sizes)
    head_axis = "heads" if case.group > 1 else None
    strategy = Ring(metadata, layout=getattr(eqattn, case.layout)(), head_axis=head_axis)

    def forward(query, key_, value):
        return attention(query, key_, value, strategy, mask=mask).attention_outputs

    def gradient(query, key_, value, cotangent):
        out, transpose = jax.vjp(forward, query, key_, value)
        return out, *transpose(cotangent)

    f, args = (
        (gradient, (query, key_, value, query))
        if case.gradient
        else (forward, (query, key_, value))
    )
    with jax.set_mesh(mesh):
        return jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)), n


def compiled(case: Case):
    """A case compiled for all TPUs of its topology, and how many are in its ring."""
    import jax
    from jax.experimental import topologies

    jax.default_backend = lambda: "tpu"  # type: ignore  # as on the host of the TPU
    devices = topologies.get_topology_desc(platform="tpu", topology_name=case.topology).devices
    program, n = lowered(case, devices, "tpu")
    return program.compile(), n


def report(program, n: int) -> dict:
    """What each device of a ring of `n` sends and holds, in bytes."""
    memory, schedule = program.memory_analysis(), Schedule(program.as_text())
    return {
        "n": n,
        "moves": [dataclasses.asdict(m) for m in schedule.moves],
        "exchanges": schedule.exchanged(),
        "other_collectives": schedule.other_collectives,
        "kernels": schedule.kernels,
        "temporary": memory.temp_size_in_bytes,
        "peak": memory.peak_memory_in_bytes,
    }


def table() -> None:
    print("| topology | n | layout | tokens | permutes | MiB sent | exposed | GiB per device |")
    print("|---|---|---|---|---|---|---|---|")
    cases = [
        ("v5e:4x4", "Contiguous", 4096, None),
        ("v5e:4x4", "Contiguous", 4096, 20_000),
        ("v5e:4x4", "Zigzag", 4096, None),
        ("v5e:16x16", "Zigzag", 4096, None),
        ("v5e:4x4", "Zigzag", 65_536, None),
        ("v5p:2x2x4", "Zigzag", 4096, None),
    ]
    for topology, layout, tokens, window in cases:
        got = report(*compiled(Case(topology, layout, tokens, window)))
        permutes, sent, exposed = ([0, 0], [0, 0], [0, 0])
        for m in (Move(**m) for m in got["moves"]):
            permutes[m.backward] += m.times
            sent[m.backward] += m.times * m.nbytes
            exposed[m.in_loop] += 0 if m.hidden else m.times
        cells = [
            topology,
            got["n"],
            layout + ("" if window is None else f", window {window:,}"),
            f"{tokens:,}",
            f"{permutes[0]} + {permutes[1]}",
            " + ".join(f"{x / 2**20:,.1f}" for x in sent),
            f"{exposed[1]} + {exposed[0]}",
            f"{got['peak'] / 2**30:.2f}",
        ]
        print("|", *(f"{c} |" for c in cells), flush=True)


if __name__ == "__main__":
    # Nothing may ask for a TPU's host, and other processes may load the compiler meanwhile.
    os.environ |= {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "JAX_PLATFORMS": "cpu",
    }
    for case in sys.argv[1:]:
        print(json.dumps(report(*compiled(Case(**json.loads(case))))), flush=True)
    if len(sys.argv) == 1:
        table()
