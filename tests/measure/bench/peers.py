"""Calls each library. All but `eqattn` and `jax.nn` are imported only when they are asked for."""

import dataclasses
import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eqattn import attention, AttentionMetadata, Blockwise, Causal, SlidingWindow, T5Bias

from .cases import Case, DIM, HEADS


def installed(name: str) -> bool:
    """Whether a library can be imported. It is not imported."""
    return name in ("eqattn", "jax.nn") or importlib.util.find_spec(name) is not None


@dataclasses.dataclass
class Program:
    """One library's computation of a case.

    **Arguments:**

    - `call`: a function that runs it to the end and returns its arrays.
    - `arrays`: a function that turns what `call` returns into float64 NumPy arrays `[b, t, h, d]`.
    - `temporary`: how many bytes of temporary memory it needs; None if that is not known.
    """

    call: Callable[[], Any]
    arrays: Callable[[Any], list[np.ndarray]]
    temporary: int | None


def draw(case: Case, seed: int = 0) -> list[np.ndarray]:
    """Draws query, key, value and the cotangent of the output, float32 `[b, t, heads, 64]`. Before
    the last comes a bias of all pairs `[b, heads, t, t]` if the score is one.
    """
    rng = np.random.default_rng(seed)
    heads = (HEADS, case.kv_heads, case.kv_heads, HEADS)
    queries = case.queries or case.tokens
    shapes = [(case.batch, n) for n in (queries, case.tokens, case.tokens, queries)]
    both = zip(shapes, heads)
    *inputs, g = [rng.standard_normal((*shape, n, DIM), dtype=np.float32) for shape, n in both]
    if case.score == "bias":
        shape = (case.batch, HEADS, queries, case.tokens)
        inputs.append(rng.standard_normal(shape, dtype=np.float32))
    return [*inputs, g]


def _mask_array(case: Case) -> np.ndarray | None:
    """The mask of a case whose program holds it as an array, bool `[t, t]`; None of others."""
    return np.tri(case.tokens, dtype=bool) if case.mask == "array" else None


def _t5(case: Case) -> T5Bias | None:
    """The score of a case, if the program holds it."""
    if case.score != "t5":
        return None
    return T5Bias(np.random.default_rng(1).standard_normal((32, HEADS), dtype=np.float32))


def _bias(case: Case) -> jax.Array | None:
    """The score that a program holds as a bias `[1, heads, t, t]`, which it makes in each call."""
    if (score := _t5(case)) is None:
        return None
    at = jnp.arange(case.tokens)
    return jnp.asarray(score.table)[score.bucket(at[:, None], at[None])].transpose(2, 0, 1)[None]


def eqattn_call(case: Case, dropout: float = 0.0) -> Callable[..., Any]:
    metadata = AttentionMetadata(runtime_dtype=case.dtype, dropout_prob=dropout)
    mask = {
        "full": None,
        "causal": Causal(),
        "window": SlidingWindow(case.window - 1, 0),
        "array": _mask_array(case),
    }[case.mask]

    def call(q, k, v, bias=None):
        key = jax.random.key(0) if dropout else None
        how: dict[str, Any] = dict(mask=mask, key=key, bias=bias, score=_t5(case))
        return attention(q, k, v, Blockwise(metadata), **how).attention_outputs

    return call


def _jax_nn_call(case: Case) -> Callable[..., Any]:
    given = _like_jax_nn(case)

    def call(q, k, v, bias=None):
        bias = _bias(case) if bias is None else bias
        return jax.nn.dot_product_attention(q, k, v, bias, **given)

    return call


def _like_jax_nn(case: Case) -> dict[str, Any]:
    window = (case.window - 1, 0) if case.mask == "window" else None
    causal, mask = case.mask == "causal", _mask_array(case)
    return dict(is_causal=causal, local_window_size=window, mask=mask)


def _check_no_score(case: Case) -> None:
    if case.score:
        raise NotImplementedError("No case gives it a bias.")


def _tokamax_call(case: Case) -> Callable[..., Any]:
    import tokamax  # pyright: ignore[reportMissingImports]

    _check_no_score(case)
    kwargs = _like_jax_nn(case)
    return functools.partial(tokamax.dot_product_attention, **kwargs, implementation="xla_chunked")


def _ejkernel_call(case: Case) -> Callable[..., Any]:
    from ejkernel.kernels._xla.flash_attention import (  # pyright: ignore[reportMissingImports]
        flash_attention,
    )

    _check_no_score(case)
    if case.mask == "array":
        raise NotImplementedError("It takes no mask.")
    window = (case.window - 1, 0) if case.mask == "window" else None
    return functools.partial(flash_attention, causal=case.mask == "causal", sliding_window=window)


_CALLS = {
    "eqattn": eqattn_call,
    "jax.nn": _jax_nn_call,
    "tokamax": _tokamax_call,
    "ejkernel": _ejkernel_call,
}


def jitted(call: Callable[..., Any], backward: bool, scored: bool = False) -> tuple[Any, int]:
    """The jitted function of `(q, k, v)`, a bias if it is `scored`, and `g` with gradients, and how
    many arguments it has.
    """
    n = 3 + scored
    if not backward:
        return jax.jit(lambda *xs: (call(*xs),)), n

    def both(*xs):
        *xs, g = xs
        out, pull = jax.vjp(call, *xs)
        return (out, *pull(g))

    return jax.jit(both), n + 1


def _jax_program(call: Callable[..., Any], case: Case, inputs: list[np.ndarray]) -> Program:
    function, n = jitted(call, case.backward, case.score == "bias")
    args = [jnp.asarray(x).astype(case.dtype) for x in inputs[:n]]
    analysis = function.lower(*args).compile().memory_analysis()
    return Program(
        lambda: jax.block_until_ready(function(*args)),
        lambda outputs: [np.asarray(x.astype(jnp.float32), np.float64) for x in outputs],
        analysis.temp_size_in_bytes if analysis is not None else None,
    )


def torch_program(case: Case, inputs: list[np.ndarray]) -> Program:
    """PyTorch's flash attention. It has no windows, so that a window is a mask."""
    import torch  # pyright: ignore[reportMissingImports]

    if case.score != "bias":
        _check_no_score(case)
    torch.set_num_threads(1)
    dtype = getattr(torch, case.dtype)
    given = lambda x: torch.from_numpy(np.ascontiguousarray(x)).to(dtype)
    q, k, v, g = (given(x.swapaxes(1, 2)) for x in (*inputs[:3], inputs[-1]))
    moved = [q, k, v, *map(given, inputs[3:-1])]
    kwargs: dict[str, Any] = dict(is_causal=case.mask == "causal")
    if case.kv_heads != HEADS:
        kwargs["enable_gqa"] = True
    if case.mask == "window":
        distance = torch.arange(case.tokens)[:, None] - torch.arange(case.tokens)
        kwargs["attn_mask"] = (distance >= 0) & (distance < case.window)
    if case.score:
        kwargs["attn_mask"] = moved[3]
    attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, **kwargs)

    def forward():
        with torch.no_grad():
            return (attend(q, k, v),)

    def both():
        out = attend(q, k, v)
        return (out, *torch.autograd.grad(out, moved, g))

    if case.backward:
        for x in moved:
            x.requires_grad_()
    return Program(
        both if case.backward else forward,
        lambda outputs: [x.detach().double().numpy().swapaxes(1, 2) for x in outputs],
        None,
    )


def program(name: str, case: Case, inputs: list[np.ndarray]) -> Program:
    """Compiles a library's program for a case."""
    if name == "torch":
        return torch_program(case, inputs)
    return _jax_program(_CALLS[name](case), case, inputs)


def dropout_program(case: Case, inputs: list[np.ndarray], rate: float) -> Program:
    """Compiles the program of `eqattn` with dropout."""
    return _jax_program(eqattn_call(case, rate), case, inputs)


def dots_program(case: Case, inputs: list[np.ndarray], block_q: int, block_k: int) -> Program:
    """Compiles the block loop of the forward pass with nothing but its two products. No softmax
    over such blocks can be faster.
    """
    block_q, block_k = math.gcd(block_q, case.tokens), math.gcd(block_k, case.tokens)

    def head(q, k, v):  # [blocks, rows, d], [blocks, keys, d]
        def rows(i):
            def visit(j, total):
                s = jnp.einsum("rd,kd->rk", q[i], k[j])
                return total + jnp.einsum("rk,kd->rd", s, v[j])

            stop = -(-(i + 1) * block_q // block_k) if case.mask == "causal" else len(k)
            return jax.lax.fori_loop(0, stop, visit, jnp.zeros_like(q[0]))

        return jax.lax.map(rows, jnp.arange(len(q)))

    def blocked(x, size):
        return x[0].swapaxes(0, 1).reshape(x.shape[2], -1, size, DIM)

    def call(q, k, v):
        out = jax.lax.map(
            lambda xs: head(*xs), (blocked(q, block_q), blocked(k, block_k), blocked(v, block_k))
        )
        return out.reshape(1, HEADS, case.tokens, DIM).swapaxes(1, 2)

    return _jax_program(call, case, inputs)
