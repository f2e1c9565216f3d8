"""What the tests of metadata share."""

import jax
import numpy as np


def same(a, b):
    """Equal trees: structure, hash of the structure, and leaves to the bit."""
    sa, sb = jax.tree.structure(a), jax.tree.structure(b)
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b))
    return (
        sa == sb
        and hash(sa) == hash(sb)
        and all(type(x) is type(y) and np.array_equal(x, y) for x, y in leaves)
    )
