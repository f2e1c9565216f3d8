"""`Dropout`: the dropout settings of a layer, as a PyTree that plain JAX transformations accept."""

import dataclasses
import numbers
import warnings
from typing import Any

import equinox as eqx
import jax
import numpy as np

from .._misc import concrete


def _is_number(x: Any) -> bool:
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


def _are_settings(p: Any, inference: Any) -> bool:
    """Whether two leaves are a probability and whether dropout is switched off.

    They are not in a tree that has a number for each leaf, such as the axes of `vmap` or a rate of
    learning. There, `inference` is None or no flag, or both are integers. Floats that are all 0.0
    or all 1.0 look like settings.
    """
    if not _is_number(p) or inference is None:
        return False
    both_integers = type(p) is type(inference) is int
    return not _is_number(inference) or (inference in (0, 1) and not both_integers)


class _Off:
    """Whether `p` is 0, as part of a tree structure.

    A filter may have taken `p` away, as in gradients and in the moments of an optimiser. Then `p`
    is `missing`, and the structure is equal to that with any `p`. So all instances have one hash.
    """

    def __init__(self, value: bool, missing: bool):
        self.value: bool = value
        self.missing: bool = missing

    def __eq__(self, other: Any) -> bool:
        loose = isinstance(other, _Off) and (self.missing or other.missing)
        return isinstance(other, _Off) and (loose or self.value == other.value)

    def __hash__(self) -> int:
        return hash(_Off)

    def __repr__(self) -> str:
        return f"off={self.value}"


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class Dropout:
    """The dropout settings `p` and `inference`. They are two leaves, as in `eqx.nn.Dropout`, so
    that checkpoints, `eqx.tree_at` and `eqx.nn.inference_mode` work alike.

    In Equinox's class, a bool leaf makes `jax.grad` raise, and a traced `p` makes `jax.jit` raise.
    Here the tree structure says whether `p` is 0, and JAX gets both as floats if `p` is a number.

    **Arguments:**

    - `p`: the probability that an attention weight is dropped.
    - `inference`: whether dropout is switched off.
    """

    p: Any
    inference: Any
    off: bool = dataclasses.field(default=False, repr=False)

    def tree_flatten_with_keys(self) -> tuple[tuple[Any, ...], _Off]:
        p, inference = self.p, self.inference
        # In a tree of filters, as for `eqx.partition`, `p` is no number, and bools stay bools.
        settings = _are_settings(p, inference)
        if settings and isinstance(inference, bool | np.bool_):
            inference = float(inference)
        if settings and isinstance(p, int | np.integer):
            p = float(p)
        off = bool(p == 0) if settings else self.off
        keys = jax.tree_util.GetAttrKey("p"), jax.tree_util.GetAttrKey("inference")
        return tuple(zip(keys, (p, inference))), _Off(off, p is None)

    def tree_flatten(self) -> tuple[tuple[Any, ...], _Off]:
        children, off = self.tree_flatten_with_keys()
        return tuple(child for _, child in children), off

    @classmethod
    def tree_unflatten(cls, off: _Off, children: Any) -> "Dropout":
        return cls(*children, off=off.value)

    @classmethod
    def of(cls, settings: Any) -> "Dropout":
        """The settings of a layer, in whose place `eqx.tree_at` may have put those of Equinox.

        **Raises:** `TypeError` for anything else.
        """
        if isinstance(settings, cls):
            return settings
        if not isinstance(settings, eqx.nn.Dropout):
            raise TypeError(f"The dropout of a layer is an eqx.nn.Dropout, got {settings!r}.")
        return cls(settings.p, settings.inference)

    def __call__(self, x: Any, *, key: Any = None, inference: Any = None) -> Any:
        """Drops entries of an array, as `eqx.nn.Dropout` does."""
        return eqx.nn.Dropout(self.rate(inference))(x, key=key)

    def rate(self, inference: Any = None) -> float:
        """The probability to use in a call; 0.0 if dropout is off.

        **Arguments:**

        - `inference`: what the call says; None takes the layer's own.

        **Raises:** `ValueError` if the probability depends on a traced value, or if `inference` is
        an array of several, and `TypeError` if it is no flag.
        """
        if isinstance(inference, str | bytes | list | tuple | dict):
            raise TypeError(f"inference is True or False, got {inference!r}.")
        if getattr(inference, "size", 1) != 1:
            raise ValueError(f"inference must be a single boolean, got {inference!r}.")
        stopped = self.inference if inference is None else inference
        stopped = stopped if isinstance(stopped, bool) else concrete(stopped)
        p = self.p if _is_number(self.p) else concrete(self.p)
        # A transformation of the layer traces both leaves, and then `p` is what it was. A `p` that
        # is traced alone was put there, such as a schedule of rates, and need not be 0.
        off = p is None and self.off and concrete(self.inference) is None
        if p == 0 or off or (stopped is not None and stopped):
            return 0.0
        if p is None or stopped is None:
            raise ValueError(
                "Whether and how much to drop is traced. Under plain jax.jit or jax.grad over a "
                "layer with dropout_p > 0, call it with inference=True, or use eqx.filter_jit or "
                "eqx.filter_grad, to which Python numbers are static. An optimiser that updates "
                "every leaf has made arrays of them: let it see arrays only, by eqx.filter. A "
                "schedule of the rate has to put Python numbers into the layer."
            )
        return float(p)

    def rate_of_call(self, inference: Any, deterministic: Any, key: Any) -> float:
        """The probability to use in a call of a `MultiheadAttention` with these arguments.

        **Raises:** what `rate` does, and `RuntimeError` if dropout is on and there is no key.
        """
        if deterministic is not None:
            inference = deterministic
            warnings.warn(
                "MultiheadAttention()(deterministic=...) is deprecated, as in Equinox; use "
                "inference=.",
                stacklevel=4,  # it is below the layer's call and its named scope
            )
        rate = self.rate(inference)
        if rate and key is None:
            raise RuntimeError(
                f"Dropout of {rate} requires a key: pass key=, or switch it off by inference=True."
            )
        return rate
