"""Kernels that read keys and values in place, for the last queries of each of many rows."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from eqattn._calls.attention import attention
from eqattn._config.metadata import AttentionMetadata
from eqattn._problem.problem import Problem
from eqattn._problem.storage import Pages, Quantized, StackLayer
from eqattn._problem.tiling import choose_tiling
from eqattn.kernels.tpu import TPULowering
from eqattn.masks._causal import Causal
from eqattn.masks._segments import KeyPadding
from eqattn.strategies import Ragged

from .specification import Kernel, KV_HEADS, LENGTH, QUERY_HEADS, ROWS


@dataclasses.dataclass(frozen=True)
class Decode:
    """A call for the last queries of each of many rows, whose lengths are known at run time. Steps
    of decoding are such calls, and parts of prompts are.

    **Arguments:**

    - `queries`: how many queries a row has.
    - `stored`: the dtype of quantised keys and values; None if they are not quantised.
    - `page`: how many tokens a page has; None if there are no pages.
    - `layers`: how many layers the arrays have, of which one is read; None if they have one.
    - `shared`: whether all queries see the same keys, as those of rows that begin alike do in
        `cascade_attention`.
    - `block_q`, `block_k`: the block sizes of the metadata; None chooses them.
    """

    queries: int = 1
    stored: Any = None
    page: int | None = None
    layers: int | None = None
    shared: bool = False
    block_q: int | None = None
    block_k: int | None = None

    @property
    def metadata(self) -> AttentionMetadata:
        sizes: Any = dict(blocksize_q=self.block_q, blocksize_k=self.block_k)
        return AttentionMetadata(runtime_dtype=jnp.bfloat16, platform="tpu", **sizes)

    @property
    def arrays(self) -> dict[str, Any]:
        like, page = jax.ShapeDtypeStruct, self.page or LENGTH
        pool = (ROWS * LENGTH // page, page, KV_HEADS)
        scales = (pool[0], 1, page * KV_HEADS)
        pool = (*([self.layers] if self.layers else []), *pool)
        return {
            "query": like((ROWS, self.queries, QUERY_HEADS, 128), jnp.bfloat16),
            "pools": (like((*pool, 128), self.stored or jnp.bfloat16),) * 2,
            "scales": (like(scales, jnp.float32),) * 2 if self.stored else (),
            "table": like((ROWS, LENGTH // page), jnp.int32),
            "lengths": like((ROWS,), jnp.int32),
            "layer": like((), jnp.int32),
        }

    def caches(self, arrays: dict[str, Any]) -> list[Any]:
        kept = list(arrays["pools"])
        if self.stored:
            kept = [Quantized(x, s, jnp.bfloat16) for x, s in zip(kept, arrays["scales"])]
        if self.layers:
            return [StackLayer(x, arrays["layer"]) for x in kept]
        return [Pages(x, arrays["table"]) for x in kept] if self.page else kept

    def build(self) -> tuple[Callable[..., Any], Sequence[Any]]:
        def call(arrays):
            key_, value = self.caches(arrays)
            lengths = arrays["lengths"]
            causal = self.queries > 1 and not self.shared
            return attention(
                arrays["query"],
                key_,
                value,
                Ragged(self.metadata),
                mask=KeyPadding(lengths) & Causal() if causal else KeyPadding(lengths),
                q_offset=lengths - self.queries if causal else None,
            ).attention_outputs

        return call, (self.arrays,)

    def tile(self) -> tuple[int, int]:
        found = []

        def look(arrays):
            key_, value = self.caches(arrays)
            cut = Problem.from_call(arrays["query"], key_, value, self.metadata)
            kernels = TPULowering("pallas")
            sizes = self.block_q, self.block_k
            found.append(choose_tiling(cut, *sizes, in_place=True, lowering=kernels))

        jax.eval_shape(look, self.arrays)
        return min(self.queries, found[0].block_q), found[0].block_k


def decode(name: str, **kw: Any) -> Kernel:
    call = Decode(**kw)
    # Bytes of a vector of 128 numbers: 8 bits each and a float32 scale, or 16 bits each.
    each = 128 + 4 if call.stored else 256
    return Kernel(
        name=name,
        call="eqattn_decode",
        build=call.build,
        tile=call.tile,
        nbytes=KV_HEADS * 2 * each,
    )


def prompt(name: str, **kw: Any) -> Kernel:
    call = Decode(queries=512, **kw)
    return Kernel(
        name=name,
        call="eqattn_fold",
        build=call.build,
        tile=call.tile,
        products=QUERY_HEADS * 2 * 128,
        cleans=True,
    )
