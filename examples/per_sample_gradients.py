"""Gradients of single samples, and products with the Hessian, through attention.

    python examples/per_sample_gradients.py            # a minute on one CPU core

A small classifier says in which half of a sequence the largest number is. A few of its training
labels are wrong. Once it is trained,

1. the gradient of each sample by itself, `vmap` of `grad`, finds them: theirs are the largest;
2. Hessian-vector products, forward over reverse and reverse over reverse, give the largest
   curvature of the loss, by power iteration;
3. the memory that XLA plans for each is compared with that of `Dense`, which holds all logits.

`Dense` has JAX's own derivatives, so results are compared with its, too.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree
from tqdm import tqdm

from eqattn import AttentionMetadata, Dense
from eqattn.nn import MultiheadAttention, with_strategy


LENGTH, SAMPLES, WRONG = 32, 256, 8
POWERS = 12  # of the Hessian, to find its largest eigenvalue
TOLERANCE = 1e-4  # relative, between two ways to compute the same


class Classifier(eqx.Module):
    """Numbers in, the logit of "the largest is in the second half" out."""

    embed: eqx.nn.Linear
    attention: MultiheadAttention
    head: eqx.nn.Linear

    def __init__(self, width: int, heads: int, key: PRNGKeyArray):
        keys = jax.random.split(key, 3)
        self.embed = eqx.nn.Linear(2, width, key=keys[0])
        self.attention = MultiheadAttention(heads, width, key=keys[1])
        self.head = eqx.nn.Linear(width, "scalar", key=keys[2])

    def __call__(self, numbers: Float[Array, " t"]) -> Float[Array, ""]:
        half = jnp.where(jnp.arange(len(numbers)) < len(numbers) // 2, -1.0, 1.0)
        x = jax.vmap(self.embed)(jnp.stack([numbers, half], axis=1))
        return self.head(self.attention(x, x, x).mean(0))


def sample_loss(
    model: Classifier, numbers: Float[Array, " t"], label: Int[Array, ""]
) -> Float[Array, ""]:
    return optax.sigmoid_binary_cross_entropy(model(numbers), label.astype(numbers.dtype))


def mean_loss(
    model: Classifier, numbers: Float[Array, "n t"], labels: Int[Array, " n"]
) -> Float[Array, ""]:
    return jax.vmap(sample_loss, (None, 0, 0))(model, numbers, labels).mean()


# What is computed ------------------------------------------------------------------------------

# A model whose leaves are arrays needs nothing but JAX's own transformations.

gradient = jax.grad(mean_loss)
per_sample_gradients = jax.vmap(jax.grad(sample_loss), (None, 0, 0))


def dot(x: PyTree, y: PyTree) -> Float[Array, ""]:
    pairs = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    return sum(jnp.sum(a * b) for a, b in pairs)


def forward_over_reverse(model: Any, direction: Any, *data: Array) -> Any:
    """The Hessian's product with a direction: the tangent of the gradient."""
    return jax.jvp(lambda m: gradient(m, *data), (model,), (direction,))[1]


def reverse_over_reverse(model: Any, direction: Any, *data: Array) -> Any:
    """The same: the gradient of the gradient's part along the direction."""
    return jax.grad(lambda m: dot(gradient(m, *data), direction))(model)


@jax.jit
def difference(x: PyTree, y: PyTree) -> Float[Array, ""]:
    """The distance of two trees, relative to the second."""
    x, y = jax.tree.leaves(x), jax.tree.leaves(y)
    apart = [a - b for a, b in zip(x, y, strict=True)]
    return jnp.sqrt(dot(apart, apart) / dot(y, y))


def memory(fn: Callable, model: Classifier, length: int) -> float:
    """MiB of temporary memory that XLA plans for a transformation, for 2 samples of a length."""
    data = jnp.zeros((2, length)), jnp.zeros(2, jnp.int32)
    args = (model, *data) if fn is per_sample_gradients else (model, model, *data)
    return jax.jit(fn).lower(*args).compile().memory_analysis().temp_size_in_bytes / 2**20


# The data and the training ---------------------------------------------------------------------


def make_data(seed: int = 0) -> tuple[Array, Array, Array]:
    """Numbers, labels, and which of the labels are wrong."""
    rng = np.random.default_rng(seed)
    numbers = rng.normal(size=(SAMPLES, LENGTH)).astype(np.float32)
    wrong = rng.choice(SAMPLES, WRONG, replace=False)
    labels = (numbers.argmax(1) >= LENGTH // 2).astype(np.int32)
    labels[wrong] = 1 - labels[wrong]
    return jnp.asarray(numbers), jnp.asarray(labels), jnp.asarray(np.sort(wrong))


def train(model: Classifier, numbers: Array, labels: Array, steps: int) -> Classifier:
    optimiser = optax.adam(1e-2)

    @eqx.filter_jit
    def step(model, state):
        loss, gradients = eqx.filter_value_and_grad(mean_loss)(model, numbers, labels)
        updates, state = optimiser.update(gradients, state)
        return eqx.apply_updates(model, updates), state, loss

    state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))
    with tqdm(range(steps), "training", unit="step") as bar:
        for _ in bar:
            model, state, loss = step(model, state)
            bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
    return model


def curvature(model: Classifier, *data: Array) -> tuple[float, Any, Any]:
    """The Hessian's largest eigenvalue in size, by power iteration. **Returns:** the eigenvalue,
    its direction, and the Hessian's product with that.
    """
    vector, unflatten = ravel_pytree(model)

    @jax.jit
    def step(direction):
        direction = direction / jnp.linalg.norm(direction)
        image = ravel_pytree(forward_over_reverse(model, unflatten(direction), *data))[0]
        return direction, image, direction @ image

    image = jax.random.normal(jax.random.key(1), vector.shape)
    with tqdm(range(POWERS), "power iteration", unit="product") as bar:
        for _ in bar:
            direction, image, value = step(image)
            bar.set_postfix_str(f"curvature {value:.3f}", refresh=False)
    return float(value), unflatten(direction), unflatten(image)


# The program -----------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """The program. **Returns:** its exit status: 1 if results disagree."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=150, help="of training (default %(default)s)")
    add("--length", type=int, default=4096, help="to plan memory for (default %(default)s)")
    add("--quick", action="store_true", help="80 steps, and memory for a length of 1024")
    options = parser.parse_args(argv)
    if options.steps < 1 or options.length < 1:
        parser.error("--steps and --length must be at least 1")
    if options.quick:
        options.steps, options.length = 80, 1024
    *data, wrong = make_data()
    model = train(Classifier(16, 2, jax.random.key(0)), *data, options.steps)
    strategy = Dense(AttentionMetadata())
    dense = with_strategy(model, strategy)
    apart = {}

    gradients = jax.jit(per_sample_gradients)(model, *data)
    norms = jax.jit(jax.vmap(lambda x: jnp.sqrt(dot(x, x))))(gradients)
    found = len(np.intersect1d(jnp.argsort(-norms)[:WRONG], wrong))
    print(f"{found} of {WRONG} wrong labels are among the {WRONG} largest of {SAMPLES} gradients")
    apart["per-sample gradients, and by Dense"] = difference(
        gradients, jax.jit(per_sample_gradients)(dense, *data)
    )
    mean = jax.tree.map(lambda x: x.mean(0), gradients)
    apart["their mean, and the mean's gradient"] = difference(mean, jax.jit(gradient)(model, *data))

    value, direction, image = curvature(model, *data)
    print(f"the largest curvature of the loss is {value:.3f}")
    apart["its product, and reverse over reverse"] = difference(
        jax.jit(reverse_over_reverse)(model, direction, *data), image
    )
    apart["its product, and by Dense"] = difference(
        jax.jit(forward_over_reverse)(dense, with_strategy(direction, strategy), *data), image
    )
    for name, distance in apart.items():
        print(f"{name:40}{distance:10.1e} apart")

    print(f"\n{f'MiB for 2 samples of {options.length}':32}{'eqattn':>10}{'Dense':>10}")
    transformations = {
        "per-sample gradients": per_sample_gradients,
        "forward over reverse": forward_over_reverse,
        "reverse over reverse": reverse_over_reverse,
    }
    with tqdm(transformations.items(), "planning memory", unit="row") as bar:
        for name, fn in bar:
            sizes = [memory(fn, m, options.length) for m in (model, dense)]
            bar.write(f"{name:32}{sizes[0]:10.1f}{sizes[1]:10.1f}", sys.stdout)
    agree = max(apart.values()) < TOLERANCE
    print("results agree" if agree else "results disagree")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
