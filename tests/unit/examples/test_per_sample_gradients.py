"""The example: gradients of samples and Hessian-vector products agree with Dense, in less memory."""

import jax
import jax.numpy as jnp
import per_sample_gradients as example
import pytest
from _programs import refuses


def test_the_hessian_is_that_of_the_loss():
    """On the logit's bias alone, where it can be written down: the mean of p (1 - p)."""
    *data, _ = example.make_data()
    model = example.Classifier(16, 2, jax.random.key(0))
    where = lambda tree: tree.head.bias
    direction = example.eqx.tree_at(
        where, jax.tree.map(lambda x: 0.0 * x, model), jnp.ones_like(where(model))
    )
    p = jax.nn.sigmoid(jax.vmap(model)(data[0]))
    for product in (example.forward_over_reverse, example.reverse_over_reverse):
        found = where(jax.jit(product)(model, direction, *data))
        assert jnp.allclose(found, (p * (1 - p)).mean(), rtol=1e-5)


def test_disagreement_is_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(example, "memory", lambda fn, model, length: 0.0)
    monkeypatch.setattr(example, "POWERS", 1)
    right = example.reverse_over_reverse
    wrong = lambda *args: jax.tree.map(lambda x: 1.001 * x, right(*args))
    monkeypatch.setattr(example, "reverse_over_reverse", wrong)
    with jax.numpy_dtype_promotion("standard"):
        assert example.main(["--steps", "1"]) == 1
    assert capsys.readouterr().out.endswith("results disagree\n")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--steps 0", "--steps and --length must be at least 1"),
        ("--length 0", "--steps and --length must be at least 1"),
        ("--steps many", "invalid int value"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    refuses(example.main, arguments.split(), message, capsys)
