"""An optimiser goes on with a converted model."""

import equinox as eqx
import jax
import numpy as np
import optax
from test_convert import KEY, Model, X

import eqattn.nn as nn


def test_optimiser_states_go_on():
    """The moments hold layers too, whose dropout settings a filter has taken away."""
    model = Model(KEY)
    adam = optax.adam(1e-2)

    def trained(model, state, steps):
        @eqx.filter_jit
        def step(model, state):
            loss = lambda model: (model(X, inference=True) ** 2).sum()
            with jax.numpy_dtype_promotion("standard"):
                updates, state = adam.update(eqx.filter_grad(loss)(model), state)
            return eqx.apply_updates(model, updates), state

        for _ in range(steps):
            model, state = step(model, state)
        return model, state

    halfway = trained(model, adam.init(eqx.filter(model, eqx.is_array)), 3)
    stayed, _ = trained(*halfway, 3)
    moved, _ = trained(*map(nn.from_equinox, halfway), 3)
    for a, b in zip(
        *[jax.tree.leaves(eqx.filter(m, eqx.is_array)) for m in (stayed, moved)], strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-4)
