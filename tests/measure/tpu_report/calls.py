"""Whole calls of attention, with all that the compiler puts around the kernels.

Arrays come and go as `[batch, tokens, heads, dim]`, as models have them. That costs transposes,
casts and sums beside a kernel. They are counted here, in bytes, for eqattn and for jax's splash
attention, on the same arrays.
"""

import dataclasses
import fnmatch
import functools as ft
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from eqattn._calls.attention import attention
from eqattn._config.metadata import AttentionMetadata
from eqattn._sweep.grid import BATCH, COL, HEAD, ROW
from eqattn.masks._causal import Causal
from eqattn.strategies import Blockwise

from . import schedule, traffic, whole
from .chips import CHIPS
from .kernels import Call, STAYING
from .peers import splash_sizes
from .rows import CallRow
from .serving import Decode
from .specification import LENGTH, ROWS
from .steps import Steps


BATCH_SIZE, TOKENS, HEADS, DIM = 8, 4096, 16, 128
GROUP = 4
"""How many query heads share a key head in the calls of grouped-query attention (GQA)."""

WIDTH = 512
"""The features that a layer reads and writes. With 2048 of them, the projections would take minutes
to compile, and would lay out their results in the same way.
"""


@dataclasses.dataclass(frozen=True)
class WholeCall:
    """A program with kernels.

    **Arguments:**

    - `name`: the name in the report, which ends with that of the library.
    - `build`: a function that returns a function to compile, and its abstract arguments.
    - `kernels`: for each kernel, by the name of its `pallas_call`, how many cycles it takes, from
        the steps of its schedule.
    """

    name: str
    build: Callable[[], tuple[Callable[..., Any], Sequence[Any]]]
    kernels: Mapping[str, Callable[[Steps], int]]


def measure(name: str, call: WholeCall, temporary: int, folder: Path) -> CallRow:
    """Makes the row of a call from what the compiler left in the `folder`.

    **Arguments:**

    - `temporary`: the bytes of temporary memory, as the compiled program tells.
    """
    chip, info, cycles = CHIPS[name], pltpu.get_tpu_info(), 0
    found = traffic.moves(traffic.dumped(folder))
    for kernel, count in call.kernels.items():
        (start,) = schedule.dumped(folder, kernel)
        cycles += count(Steps(schedule.read(folder, start, chip)))
    total, outside = sum(m.nbytes for m in found), sum(m.nbytes for m in found if not m.kernel)
    rate = info.bf16_ops_per_second / (2 * chip.products)
    return CallRow(
        call=call.name,
        chip=name,
        total=total,
        outside=outside,
        temporary=temporary,
        cycles=cycles,
        kernel_ms=round(1e3 * cycles / rate, 3),
        outside_ms=round(1e3 * outside / info.mem_bw_bytes_per_second, 3),
    )


_ODD = TOKENS - 96
"""A length that blocks do not divide, in as many blocks."""


def _bias(tokens: int, batch: int = BATCH_SIZE) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((batch, HEADS, tokens, tokens), jnp.bfloat16)


def _eqattn(query: Any, key_: Any, value: Any, bias: Any = None) -> Any:
    strategy = Blockwise(AttentionMetadata(runtime_dtype=jnp.bfloat16, platform="tpu"))
    return attention(query, key_, value, strategy, mask=Causal(), bias=bias).attention_outputs


def _splash(query: Any, key_: Any, value: Any) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as splash,
        splash_attention_mask as masks,
    )

    mask = masks.MultiHeadMask([masks.CausalMask((TOKENS, TOKENS))] * HEADS)
    sizes = splash_sizes(1024, 1024, 512, fused=True)
    query = query * jnp.bfloat16(DIM**-0.5)
    query, key_, value = [jnp.swapaxes(x, 1, 2) for x in (query, key_, value)]
    options: Any = dict(head_shards=1, q_seq_shards=1, block_sizes=sizes)
    if HEADS == key_.shape[1]:
        out: Any = jax.vmap(splash.make_splash_mha(mask, **options))(query, key_, value)
        return jnp.swapaxes(out, 1, 2)
    # One kernel for the query heads of each key head.
    mask = masks.MultiHeadMask(mask.masks[:GROUP])
    query = query.reshape(BATCH_SIZE, -1, GROUP, TOKENS, DIM)
    out = jax.vmap(jax.vmap(splash.make_splash_mqa(mask, **options)))(query, key_, value)
    return jnp.swapaxes(out.reshape(BATCH_SIZE, HEADS, TOKENS, DIM), 1, 2)


def _arrays(n: int, tokens: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    return (jax.ShapeDtypeStruct((BATCH_SIZE, tokens, HEADS, DIM), jnp.bfloat16),) * n


def _forward(
    f: Callable[..., Any], *more: Any, tokens: int = TOKENS
) -> tuple[Callable[..., Any], Sequence[Any]]:
    return f, (*_arrays(3, tokens), *more)


def _training(
    f: Callable[..., Any], *more: Any, tokens: int = TOKENS
) -> tuple[Callable[..., Any], Sequence[Any]]:
    def step(cotangent, *arrays):
        out, transpose = jax.vjp(f, *arrays)
        return out, *transpose(cotangent)

    return step, (*_arrays(4, tokens), *more)


def _layer(f: Callable[..., Any]) -> Callable[..., Any]:
    """A layer around attention: what queries, keys and values are made of, and what becomes of its
    output. The compiler chooses how the projections read and write their arrays.
    """

    def layer(x: Any, into: Any, out: Any) -> Any:
        heads = [jnp.einsum("btm,mhd->bthd", x, w) for w in into]
        return jnp.einsum("bthd,hdm->btm", f(*heads), out)

    return layer


def _layer_arrays(group: int) -> tuple[Any, ...]:
    like = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    into, out = (like(WIDTH, n, DIM) for n in (HEADS, HEADS // group)), like(HEADS, DIM, WIDTH)
    queries, keys = into
    return like(BATCH_SIZE, TOKENS, WIDTH), (queries, keys, keys), out


def _forward_layer(
    f: Callable[..., Any], group: int = 1
) -> tuple[Callable[..., Any], Sequence[Any]]:
    return _layer(f), _layer_arrays(group)


def _training_layer(
    f: Callable[..., Any], group: int = 1
) -> tuple[Callable[..., Any], Sequence[Any]]:
    def step(x, into, out, cotangent):
        y, transpose = jax.vjp(_layer(f), x, into, out)
        return y, *transpose(cotangent)

    arrays = _layer_arrays(group)
    return step, (*arrays, arrays[0])


def _cycles(
    kept: tuple[int, ...], lag: int, once: tuple[int, ...] = (), group: int = 1
) -> Callable[[Steps], int]:
    """Adds up the cycles of all steps on the list of a kernel of eqattn."""

    def cycles(steps: Steps) -> int:
        call = Call(tokens=TOKENS, dim=DIM, group=group)
        tile, heads = (
            call.tile(),
            BATCH_SIZE * HEADS // group // (call.heads_per_step() if lag else 1),
        )
        counts = whole.count(TOKENS, tile, heads, kept, lag, steps.skips, group)
        return counts.cycles(steps, once)

    return cycles


def _live(steps: Steps) -> int:
    """Adds up the cycles that a kernel of splash spends on blocks with a visible pair. Steps that
    do nothing, and the ends of rows, are left out.
    """
    side = TOKENS // 1024
    return BATCH_SIZE * HEADS * side * (side + 1) // 2 * steps.full.cycles


def _decoding(steps: Steps) -> int:
    _, keys = Decode().tile()
    return ROWS * LENGTH // keys * steps.full.cycles


_FOLD = {"eqattn_fold": _cycles((BATCH, HEAD, ROW), 1)}
_SUM = {"eqattn_sum": _cycles((BATCH, HEAD, COL), 0, STAYING)}
_PAIRS = {"eqattn_sum_pairs": _cycles((BATCH, HEAD, ROW, COL), 0)}
_GROUPED_FOLD = {"eqattn_fold": _cycles((BATCH, HEAD, ROW), 1, group=GROUP)}
_GROUPED_SUM = {"eqattn_sum": _cycles((BATCH, HEAD, COL), 0, STAYING, GROUP)}
_SPLASH = {"splash_mha_fwd_no_residuals": _live}
_SPLASH_SUM = {"splash_mha_fwd_residuals": _live, "splash_mha_dkv_no_residuals": _live}
_SPLASH_GROUPED = {"splash_mqa_fwd_no_residuals": _live}
_SPLASH_GROUPED_SUM = {"splash_mqa_fwd_residuals": _live, "splash_mqa_dkv_no_residuals": _live}
CALLS = (
    WholeCall("forward, eqattn", ft.partial(_forward, _eqattn), _FOLD),
    WholeCall("training, eqattn", ft.partial(_training, _eqattn), _FOLD | _SUM),
    *(
        WholeCall(f"{name}, eqattn", ft.partial(f, _eqattn, bias, tokens=bias.shape[-1]), kernels)
        for name, f, bias, kernels in (
            ("bias", _forward, _bias(TOKENS), _FOLD),
            ("bias training", _training, _bias(TOKENS), _FOLD | _SUM | _PAIRS),
            # All sequences share it. Else its training would not fit into the memory of a v5e.
            ("bias of an odd length", _forward, _bias(_ODD, 1), _FOLD),
        )
    ),
    WholeCall("decoding, eqattn", Decode().build, {"eqattn_decode": _decoding}),
    WholeCall("layer, eqattn", ft.partial(_forward_layer, _eqattn), _FOLD),
    WholeCall("layer training, eqattn", ft.partial(_training_layer, _eqattn), _FOLD | _SUM),
    WholeCall("GQA layer, eqattn", ft.partial(_forward_layer, _eqattn, GROUP), _GROUPED_FOLD),
    WholeCall(
        "GQA layer training, eqattn",
        ft.partial(_training_layer, _eqattn, GROUP),
        _GROUPED_FOLD | _GROUPED_SUM,
    ),
    WholeCall("forward, splash", ft.partial(_forward, _splash), _SPLASH),
    WholeCall("training, splash", ft.partial(_training, _splash), _SPLASH_SUM),
    WholeCall("layer, splash", ft.partial(_forward_layer, _splash), _SPLASH),
    WholeCall("layer training, splash", ft.partial(_training_layer, _splash), _SPLASH_SUM),
    WholeCall("GQA layer, splash", ft.partial(_forward_layer, _splash, GROUP), _SPLASH_GROUPED),
    WholeCall(
        "GQA layer training, splash",
        ft.partial(_training_layer, _splash, GROUP),
        _SPLASH_GROUPED_SUM,
    ),
)


def choose(patterns: Sequence[str], peers: bool = False) -> list[WholeCall]:
    """The calls whose name matches one of the patterns; without patterns all, those of other
    libraries only with `peers`.

    **Raises:** `ValueError` for a pattern that no call matches.
    """
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(c.name, pattern) for c in CALLS):
            names = ", ".join(repr(c.name) for c in CALLS)
            raise ValueError(f"no call is called {pattern!r}; there are {names}")
    if patterns:
        return [c for c in CALLS if any(fnmatch.fnmatchcase(c.name, p) for p in patterns)]
    return [c for c in CALLS if peers or c.name.endswith("eqattn")]
