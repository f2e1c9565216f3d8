"""Measures what statistics of attention cost in comparison with the call itself."""

import functools as ft
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from eqattn import stats
from eqattn._calls.attention import attention
from eqattn.masks import Causal
from eqattn.scores import ScoreFn

from . import peers
from .cases import Case, Row
from .timing import ratios, rounds_of


def _near(logit: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """Whether a key is one of the last 64 of a query, as a number."""
    return (q - k < 64).astype(logit.dtype)


def _with_max_logits(query: Array, key_: Array, value: Array) -> tuple[Any, Any]:
    out = attention(query, key_, value, mask=Causal(), return_max_logits=True)
    return out.attention_outputs, out.max_logits


def statistics(case: Case, rounds: int) -> Iterator[Row]:
    """Measures each statistic as a separate call, which is given no values. The largest logit is
    measured with the call that it belongs to. What a statistic adds to a call whose logsumexp it is
    given is measured without that call.
    """
    query, key_, value = peers.draw(case)[:3]
    query, key_, value = (jnp.asarray(x) for x in (query, key_, value))
    of_keys: dict[str, Callable[..., Any]] = {
        "entropy": stats.entropy,
        "effective window": stats.effective_window,
        "mass": stats.mass,
        "expectation": lambda q, k, **kw: stats.expectation(ScoreFn(_near), q, k, **kw),
    }
    programs = {
        "forward": (lambda q, k, v: attention(q, k, v, mask=Causal()).attention_outputs),
        "max logits": _with_max_logits,
    }
    calls = {
        name: ft.partial(_run, jax.jit(f).lower(query, key_, value).compile(), query, key_, value)
        for name, f in programs.items()
    }
    known = attention(query, key_, value, mask=Causal(), return_logsumexp=True).logsumexp
    for name, f in of_keys.items():
        g = ft.partial(f, mask=Causal())
        calls[name] = ft.partial(_run, jax.jit(g).lower(query, key_).compile(), query, key_)
        if name != "effective window":  # It divides by the sum of the keys' probabilities.
            args = query, key_, known
            added = jax.jit(lambda q, k, known, g=g: g(q, k, logsumexp=known))
            calls[f"{name} of a call"] = ft.partial(_run, added.lower(*args).compile(), *args)
    for call in calls.values():
        call()
    medians, quartiles = ratios(rounds_of(calls, rounds), "forward")
    for name in calls:
        if name != "forward":
            spread = {"eqattn": quartiles[name]}
            yield case.row(f"{name} / forward", {"eqattn": medians[name]}, quartiles=spread)


def _run(program: Callable[..., Any], *args: Array) -> Any:
    return jax.block_until_ready(program(*args))


EXPERIMENTS = {"statistics": statistics}
