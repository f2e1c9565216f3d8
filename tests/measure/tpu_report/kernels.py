"""The kernels that are measured. A new one is one more `Kernel` in `KERNELS`."""

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from eqattn._calls.attention import attention
from eqattn._config.metadata import AttentionMetadata
from eqattn._problem.block_classes import choose_live_tiling
from eqattn._problem.problem import Problem
from eqattn._sweep.grid import BATCH, COL, HEAD, replaced, ROW
from eqattn.kernels.tpu import TPULowering
from eqattn.kernels.tpu._chip import most_heads_per_step
from eqattn.masks._base import Dense as DenseMask
from eqattn.masks._causal import Causal, SlidingWindow
from eqattn.masks._segments import Segments
from eqattn.masks._selected import Selected
from eqattn.scores._positional import T5Bias
from eqattn.strategies import Blockwise

from .peers import PEERS
from .serving import decode, prompt
from .specification import Kernel, Whole


HEADS = 8
AT = " at "
"""What stands between the name of a kernel and the sizes of its blocks."""
STAYING = (1, 3)
"""Two edges, by their order in the schedule. For all queries of a head, they clear the gradients
before its first column, and write them after its last. Edges 0 and 2 are those of a column.
"""


@dataclasses.dataclass(frozen=True)
class Call:
    """A causal call of `attention` in bfloat16, with one batch element and 8 heads.

    **Arguments:**

    - `group`: how many query heads share a key head.
    - `tokens`, `dim`: the number of queries and of keys, and the head dim of all.
    - `block_q`, `block_k`: the block sizes of the metadata; None chooses them.
    - `gradient`: the arguments (0, 1, 2) whose gradients are returned too.
    - `of_operands`: whether the gradients of the further arrays are returned too.
    - `tangent`: whether the tangent of the output is returned too, for tangents of all arguments.
    - `weighted`: whether the options multiply probabilities by dropout weights.
    - `apart`: whether each head visits other blocks.
    - `operands`: the shapes of further arrays, by name.
    - `options`: a function of these arrays that returns keyword arguments of `attention`, and
        keyword arguments of the metadata.
    """

    tokens: int = 4096
    dim: int = 128
    group: int = 1
    block_q: int | None = None
    block_k: int | None = None
    gradient: tuple[int, ...] = ()
    of_operands: bool = False
    tangent: bool = False
    weighted: bool = False
    apart: bool = False
    operands: tuple[tuple[str, jax.ShapeDtypeStruct], ...] = ()
    options: Callable[..., tuple[dict[str, Any], dict[str, Any]]] = lambda: ({}, {})

    def metadata(self, **kw: Any) -> AttentionMetadata:
        sizes = dict(blocksize_q=self.block_q, blocksize_k=self.block_k)
        return AttentionMetadata(runtime_dtype=jnp.bfloat16, platform="tpu", **sizes, **kw)

    @property
    def arrays(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        like = lambda n: jax.ShapeDtypeStruct((1, self.tokens, n, self.dim), jnp.bfloat16)
        keys = like(HEADS // self.group)
        return like(HEADS), keys, keys

    def build(self) -> tuple[Callable[..., Any], Sequence[Any]]:
        operands = dict(self.operands)

        def forward(arrays, operands):
            call: dict[str, Any]
            call, fields = self.options(**operands)
            strategy, call = Blockwise(self.metadata(**fields)), {"mask": Causal()} | call
            query, key_, value = arrays
            out = attention(query, key_, value, strategy, **call)
            return out.attention_outputs

        def backward(arrays, operands, cotangent):
            def of(moved, more):
                return forward(replaced(arrays, self.gradient, moved), operands | more)

            more = operands if self.of_operands else {}
            out, transpose = jax.vjp(of, [arrays[i] for i in self.gradient], more)
            return out, transpose(cotangent)

        def tangent(arrays, operands, moved):
            return jax.jvp(lambda x: forward(x, operands), (arrays,), (moved,))

        if self.tangent:
            return tangent, (self.arrays, operands, self.arrays)
        if self.gradient or self.of_operands:
            return backward, (self.arrays, operands, self.arrays[0])
        return forward, (self.arrays, operands)

    def heads_per_step(self) -> int:
        """How many heads a step of its forward visits."""
        single = self.weighted or self.apart
        return 1 if single else most_heads_per_step(math.prod(self.tile()), self.dim)

    def tile(self) -> tuple[int, int]:
        """How many rows, queries of all heads that share keys, and how many keys a block has."""
        found = []

        def look(arrays):
            query, key_, value = arrays
            cut = Problem.from_call(query, key_, value, self.metadata(), mask=Causal())
            kernels = TPULowering("pallas")
            sizes = self.block_q, self.block_k
            found.append(choose_live_tiling(cut, *sizes, lowering=kernels))

        jax.eval_shape(look, self.arrays)
        return found[0].block[::-1]


def _forward(
    name: str, *, whole: bool = True, plain: str = "", masked: str = "corner", **kw: Any
) -> Kernel:
    call = Call(**kw)
    kept = (BATCH, HEAD, ROW)
    return Kernel(
        name=name,
        call="eqattn_fold",
        build=call.build,
        tile=call.tile,
        products=2 * call.dim,
        whole=Whole(call.tokens, HEADS, kept, lag=1) if whole else None,
        plain=plain,
        heads_per_step=call.heads_per_step,
        masked=masked,
    )


def _backward(
    name: str,
    gradient: tuple[int, ...],
    products: int,
    *,
    plain: str = "",
    entire: bool = True,
    call: str = "eqattn_sum",
    **kw: Any,
) -> Kernel:
    made = Call(gradient=gradient, **kw)
    return Kernel(
        name=name,
        call=call,
        build=made.build,
        tile=made.tile,
        products=products * made.dim,
        whole=Whole(
            made.tokens,
            HEADS,
            (BATCH, HEAD, ROW if gradient == (0,) else COL),
            lag=0,
            once=STAYING if gradient == (0, 1, 2) else (),
        )
        if entire and not plain and gradient
        else None,
        plain=plain,
    )


def _tangent(name: str, **kw: Any) -> Kernel:
    call = Call(tangent=True, **kw)
    kept = (BATCH, HEAD, ROW)
    return Kernel(
        name=name,
        call="eqattn_sum",
        build=call.build,
        tile=call.tile,
        products=5 * call.dim,
        whole=Whole(call.tokens, HEADS, kept, lag=0),
    )


def _feature(
    name: str,
    options: Callable[..., Any],
    weighted: bool = False,
    masked: str = "corner",
    **operands: Any,
) -> Kernel:
    shapes = {k: jax.ShapeDtypeStruct(shape, dtype) for k, (shape, dtype) in operands.items()}
    return _forward(
        f"forward, {name}",
        whole=False,
        plain="forward",
        masked=masked,
        weighted=weighted,
        operands=tuple(shapes.items()),
        options=options,
    )


def _causal_with(name: str, mask: Any, of: Any) -> Kernel:
    return _feature(name, lambda x: ({"mask": Causal() & mask(x)}, {}), masked="masked", x=of)


def _tunable(
    make: Callable[..., Kernel], name: str, *args: Any, sizes: Sequence[tuple[int, int]], **kw: Any
) -> Kernel:
    """A kernel whose blocks may have other `sizes`."""

    def sized(queries: int, keys: int) -> Kernel:
        blocks = dict(block_q=queries, block_k=keys)
        return make(f"{name}{AT}{queries} x {keys}", *args, **kw, **blocks)

    return dataclasses.replace(make(name, *args, **kw), sized=sized, sizes=tuple(sizes))


_T = Call().tokens
_SIDES = [(q, k) for q in (512, 1024, 2048) for k in (512, 1024, 2048)]
_OF_PROMPTS = [(q, k) for q in (32, 64, 128, 256) for k in (128, 256, 512)]
_TOKENS = [(1, k) for k in (256, 512, 1024, 2048)]
_BY_DIFFERENCE: dict[str, Any] = dict(
    operands=(("table", jax.ShapeDtypeStruct((32, HEADS), jnp.float32)),),
    options=lambda table: ({"score": T5Bias(table)}, {}),
)
_BIAS: dict[str, Any] = dict(
    operands=(("bias", jax.ShapeDtypeStruct((1, HEADS, _T, _T), jnp.float32)),),
    options=lambda bias: ({"bias": bias}, {}),
)
_LISTED: dict[str, Any] = dict(
    apart=True,
    block_q=512,
    block_k=512,
    operands=(("listed", jax.ShapeDtypeStruct((1, HEADS, _T // 512, 4), jnp.int32)),),
    options=lambda listed: ({"mask": Causal() & Selected(listed, 512, 512)}, {}),
)
KERNELS = (
    _tunable(_forward, "forward", sizes=_SIDES),
    _tunable(_forward, "forward, T=32768", sizes=_SIDES, tokens=32_768),
    _forward("forward, 2048 queries", block_q=2048, masked="masked"),
    _tunable(_forward, "forward, D=64", sizes=_SIDES, dim=64),
    _tunable(_forward, "forward, D=256", sizes=_SIDES, dim=256),
    _tunable(_backward, "backward", (0, 1, 2), 5, sizes=_SIDES),
    _backward("backward, D=64", (0, 1, 2), 5, dim=64),
    _backward("backward, queries", (0,), 3),
    _backward("backward, keys and values", (1, 2), 4),
    _backward("backward, bias", (0, 1, 2), 5, plain="backward", **_BIAS),
    _backward("backward, of a bias", (), 2, of_operands=True, call="eqattn_sum_pairs", **_BIAS),
    _backward("backward, T5 bias", (0, 1, 2), 5, plain="backward", **_BY_DIFFERENCE),
    _backward("backward, table of T5 bias", (), 2, of_operands=True, **_BY_DIFFERENCE),
    _tangent("forward mode"),
    _tunable(decode, "decode", sizes=_TOKENS),
    decode("decode, 4 queries", queries=4),
    _tunable(decode, "decode, int8", sizes=_TOKENS, stored=jnp.int8),
    decode("decode, pages of 64", page=64),
    decode("decode, one of 4 layers", layers=4),
    decode("decode, pages that 8 rows share", queries=8, page=64, shared=True),
    _tunable(prompt, "prompt", sizes=_OF_PROMPTS),
    _tunable(prompt, "prompt, int8", sizes=_OF_PROMPTS, stored=jnp.int8),
    prompt("prompt, pages of 64", page=64),
    _feature("window", lambda: ({"mask": Causal() & SlidingWindow(2047, 0)}, {}), masked="edge"),
    _causal_with("segments", Segments, ((1, _T), jnp.int32)),
    _feature("sinks", lambda aux: ({}, {"softmax_aux": aux}), aux=((HEADS,), jnp.float32)),
    _feature("soft cap", lambda: ({}, {"logits_soft_cap": 30.0})),
    _forward("forward, bias", whole=False, plain="forward", **_BIAS),
    _causal_with("dense mask", DenseMask, ((1, HEADS, _T, _T), jnp.bool_)),
    _forward("forward, T5 bias", whole=False, plain="forward", **_BY_DIFFERENCE),
    _forward("forward, listed blocks of 512", whole=False, masked="masked", **_LISTED),
    _backward("backward, listed blocks of 512", (0, 1, 2), 5, entire=False, **_LISTED),
    _feature("dropout", lambda: ({"key": jax.random.key(0)}, {"dropout_prob": 0.1}), weighted=True),
)


def choose(patterns: Sequence[str], peers: bool = False) -> list[Kernel]:
    """The kernels whose name matches one of the patterns; all kernels if there are no patterns.

    **Raises:** `ValueError` for a pattern that no kernel matches.
    """
    kernels = [*KERNELS, *(PEERS if peers else ())]
    if any(AT in pattern for pattern in patterns):
        kernels += [k.sized(*sizes) for k in KERNELS if k.sized for sizes in k.sizes]
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(k.name, pattern) for k in kernels):
            names = ", ".join(repr(k.name) for k in kernels)
            raise ValueError(f"no kernel is called {pattern!r}; there are {names}")
    if not patterns:
        return kernels
    return [k for k in kernels if any(fnmatch.fnmatchcase(k.name, p) for p in patterns)]
