"""The kernels that are measured. To add one, add a `Kernel` to `KERNELS`."""

import dataclasses
import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._attention import attention
from .._blocking import BATCH, choose_blocking, HEAD
from .._masks import Causal, KeyPadding, Segments, SlidingWindow
from .._metadata import AttentionMetadata
from .._problem import problem
from .._traverse import COL, replaced, ROW
from ..strategies import Blockwise, Ragged
from .peers import PEERS
from .specification import Kernel, KV_HEADS, LENGTH, QUERY_HEADS, ROWS, Whole


HEADS = 8


@dataclasses.dataclass(frozen=True)
class Call:
    """A causal call of `attention` in bfloat16: one batch element, 8 heads, automatic blocks.

    **Arguments:**

    - `tokens`, `dim`: queries and keys, and the head dim of all.
    - `block_q`, `block_k`: of the metadata.
    - `gradient`: the arguments (0, 1, 2) whose gradients are returned too.
    - `operands`: shapes of further arrays by name.
    - `options`: of these arrays, keyword arguments of `attention` and of the metadata.
    """

    tokens: int = 4096
    dim: int = 128
    block_q: int | None = None
    block_k: int | None = None
    gradient: tuple[int, ...] = ()
    operands: tuple[tuple[str, jax.ShapeDtypeStruct], ...] = ()
    options: Callable[..., tuple[dict[str, Any], dict[str, Any]]] = lambda: ({}, {})

    def metadata(self, **kw: Any) -> AttentionMetadata:
        sizes = dict(blocksize_q=self.block_q, blocksize_k=self.block_k)
        return AttentionMetadata(runtime_dtype=jnp.bfloat16, platform="tpu", **sizes, **kw)

    @property
    def arrays(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (jax.ShapeDtypeStruct((1, self.tokens, HEADS, self.dim), jnp.bfloat16),) * 3

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
            def of(*moved):
                return forward(replaced(arrays, self.gradient, moved), operands)

            out, transpose = jax.vjp(of, *[arrays[i] for i in self.gradient])
            return out, transpose(cotangent)

        if self.gradient:
            return backward, (self.arrays, operands, self.arrays[0])
        return forward, (self.arrays, operands)

    def tile(self) -> tuple[int, int]:
        """Queries and keys of a block."""
        found = []

        def look(arrays):
            query, key_, value = arrays
            cut = problem(query, key_, value, self.metadata(), mask=Causal())
            found.append(choose_blocking(cut, self.block_q, self.block_k, kernel="pallas"))

        jax.eval_shape(look, self.arrays)
        return found[0].block_q, found[0].block_k


def _forward(name: str, *, whole: bool = True, plain: str = "", **kw: Any) -> Kernel:
    call = Call(**kw)
    kept = (BATCH, HEAD, ROW)
    return Kernel(
        name=name,
        call="eqattn_fold",
        build=call.build,
        tile=call.tile,
        products=2 * call.dim,
        whole=Whole(call.tokens, kept, lag=1) if whole else None,
        plain=plain,
    )


def _backward(name: str, gradient: tuple[int, ...], products: int, **kw: Any) -> Kernel:
    call = Call(gradient=gradient, **kw)
    return Kernel(
        name=name,
        call="eqattn_sum",
        build=call.build,
        tile=call.tile,
        products=products * call.dim,
        whole=Whole(call.tokens, (BATCH, HEAD, ROW if gradient == (0,) else COL), lag=0),
    )


def _feature(name: str, options: Callable[..., Any], **operands: Any) -> Kernel:
    shapes = {k: jax.ShapeDtypeStruct(shape, dtype) for k, (shape, dtype) in operands.items()}
    return _forward(
        f"forward, {name}",
        whole=False,
        plain="forward",
        operands=tuple(shapes.items()),
        options=options,
    )


class Decode:
    """A query for each of many rows of keys and values, of lengths that are known at run time."""

    metadata = AttentionMetadata(runtime_dtype=jnp.bfloat16, platform="tpu")

    @property
    def arrays(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        shapes = (1, QUERY_HEADS), (LENGTH, KV_HEADS), (LENGTH, KV_HEADS)
        return tuple(jax.ShapeDtypeStruct((ROWS, *s, 128), jnp.bfloat16) for s in shapes)

    def build(self) -> tuple[Callable[..., Any], Sequence[Any]]:
        def call(arrays, lengths):
            query, key_, value = arrays
            mask = KeyPadding(lengths)
            return attention(query, key_, value, Ragged(self.metadata), mask=mask).attention_outputs

        return call, (self.arrays, jax.ShapeDtypeStruct((ROWS,), jnp.int32))

    def tile(self) -> tuple[int, int]:
        found = []

        def look(arrays):
            query, key_, value = arrays
            cut = problem(query, key_, value, self.metadata)
            found.append(choose_blocking(cut, None, None, in_place=True, kernel="pallas"))

        jax.eval_shape(look, self.arrays)
        return 1, found[0].block_k


_DECODE = Decode()
_T = Call().tokens
KERNELS = (
    _forward("forward"),
    _forward("forward, T=32768", tokens=32_768),
    _forward("forward, 2048 queries", block_q=2048),
    _forward("forward, D=64", dim=64),
    _forward("forward, D=256", dim=256),
    _forward("forward, D=256, 1024 keys", dim=256, block_k=1024),
    _backward("backward, queries", (0,), 3),
    _backward("backward, keys and values", (1, 2), 4),
    Kernel(
        name="decode",
        call="eqattn_decode",
        build=_DECODE.build,
        tile=_DECODE.tile,
        nbytes=KV_HEADS * 2 * 128 * 2,
    ),
    _feature("window", lambda: ({"mask": Causal() & SlidingWindow(2047, 0)}, {})),
    _feature(
        "segments",
        lambda ids: ({"mask": Causal() & Segments(ids)}, {}),
        ids=((1, _T), jnp.int32),
    ),
    _feature("sinks", lambda aux: ({}, {"softmax_aux": aux}), aux=((HEADS,), jnp.float32)),
    _feature("soft cap", lambda: ({}, {"logits_soft_cap": 30.0})),
    _feature("bias", lambda x: ({"bias": x}, {}), x=((1, HEADS, _T, _T), jnp.float32)),
    _feature("dropout", lambda: ({"key": jax.random.key(0)}, {"dropout_prob": 0.1})),
)


def choose(patterns: Sequence[str], peers: bool = False) -> list[Kernel]:
    """The kernels whose name is, or globs, one of the patterns; all, if there are none.

    **Raises:** `ValueError` for a pattern that no kernel matches.
    """
    kernels = [*KERNELS, *(PEERS if peers else ())]
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(k.name, pattern) for k in kernels):
            names = ", ".join(repr(k.name) for k in kernels)
            raise ValueError(f"no kernel is called {pattern!r}; there are {names}")
    if not patterns:
        return kernels
    return [k for k in kernels if any(fnmatch.fnmatchcase(k.name, p) for p in patterns)]
