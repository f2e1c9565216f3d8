"""What a case does to the attention function. Each program is compiled once and returns everything
that is judged:

`values` (out, lse), `grads`, `tangents` and `hvps`, each a list with one dict per variant, and
`summed`, gradients that two variants share.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def _named(pair):
    return dict(zip(("out", "lse"), pair, strict=True))


def _pull(call, arguments, cts):
    outputs, pull = jax.vjp(call, arguments)
    return outputs, pull(cts)[0]


def _loss(call, cts):
    """The scalar whose gradient is judged. Rows without a key have lse = -inf, and no say."""

    def loss(arguments):
        out, lse = call(arguments)
        judged = jnp.where(jnp.isfinite(lse), lse, jnp.zeros_like(lse))
        ct_out, ct_lse = cts
        total = jnp.sum(out.astype(lse.dtype) * ct_out.astype(lse.dtype))
        return total + jnp.sum(judged * ct_lse), (out, lse)

    return loss


def jit(call, variants, directions, cts):
    # Plain, not differentiated; then under vjp. (Peers differ between the two.)
    *plain, top = call(variants[0], return_max_logits=True)
    outputs, grads = _pull(call, variants[0], cts)
    values = {**_named(plain), "top": top}
    return {"values": [values], "values_under_vjp": [_named(outputs)], "grads": [grads]}


def grad(call, variants, directions, cts):
    grads, outputs = jax.grad(_loss(call, cts), has_aux=True)(variants[0])
    return {"values": [_named(outputs)], "grads": [grads]}


def jvp(call, variants, directions, cts):
    outputs, tangents = jax.jvp(call, (variants[0],), (directions,))
    return {"values": [_named(outputs)], "tangents": [_named(tangents)]}


def linearize(call, variants, directions, cts):
    outputs, linear = jax.linearize(call, variants[0])
    return {"values": [_named(outputs)], "tangents": [_named(linear(directions))]}


def hvp(call, variants, directions, cts):
    gradient = jax.grad(lambda a: _loss(call, cts)(a)[0])
    grads, hvps = jax.jvp(gradient, (variants[0],), (directions,))
    return {"grads": [grads], "hvps": [hvps]}


def checkpoint(call, variants, directions, cts):
    outputs, grads = _pull(jax.checkpoint(call), variants[0], cts)
    return {"values": [_named(outputs)], "grads": [grads]}


def _stack(variants):
    """Two sets of q, k, v with a new leading axis, the rest shared; and where that axis is."""
    moving = {n: jnp.stack([a[n] for a in variants]) for n in "qkv" if n in variants[0]}
    shared = {n: x for n, x in variants[0].items() if n not in moving}
    return moving, shared


def _unstack(tree, n: int = 2):
    return [jax.tree.map(lambda x, i=i: x[i], tree) for i in range(n)]


def vmap(call, variants, directions, cts):
    moving, shared = _stack(variants)
    outputs = jax.vmap(lambda m: call({**shared, **m}))(moving)
    return {"values": _unstack(_named(outputs))}


def vmap_grad(call, variants, directions, cts):
    moving, shared = _stack(variants)
    outputs, grads = jax.vmap(lambda m: _pull(call, {**shared, **m}, cts))(moving)
    return {"values": _unstack(_named(outputs)), "grads": _unstack(grads)}


def scan(call, variants, directions, cts):
    moving, shared = _stack(variants)

    def run(arguments):
        moving, shared = arguments
        return jax.lax.scan(lambda c, m: (c, call({**shared, **m})), None, moving)[1]

    both = jax.tree.map(lambda x: jnp.stack([x, x]), cts)
    outputs, (moving, shared) = _pull(run, (moving, shared), both)
    return {"values": _unstack(_named(outputs)), "grads": _unstack(moving), "summed": shared}


TRANSFORMS = {
    f.__name__: f for f in (jit, grad, jvp, linearize, hvp, vmap, vmap_grad, scan, checkpoint)
}
