"""How rotary frequencies change for contexts longer than those trained on.

Formulas are written once, for NumPy and `jax.numpy`: frequencies are a NumPy array where `theta` is
a Python float, and traced where it is.
"""

import abc
import math
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from .._misc import as_flag


def plain_frequencies(dim: int, theta: Any) -> Any:
    """`theta^(-2i/dim)` for each pair `i`, in radians per position."""
    exponents = -np.arange(0, dim, 2) / max(dim, 1)
    if isinstance(theta, float):
        return theta**exponents
    return theta ** jnp.asarray(exponents, theta.dtype)


def _numbers(module: Any, least: float = 0.0) -> None:
    """Checks all fields that are numbers: finite and above `least`."""
    for name in module.__dataclass_fields__:
        value = getattr(module, name)
        if name == "truncate":
            as_flag(value, name)
            continue
        if value is None and name == "attention_factor":
            continue
        if isinstance(value, bool) or not isinstance(value, int | float | np.number):
            raise TypeError(f"{name} is a Python number: it is static. Got {value!r}.")
        if not least < value < math.inf:
            raise ValueError(f"{name} must be finite and above {least:g}, got {value}.")


class AbstractRotaryScaling(eqx.Module):
    """Base of the scalings. A subclass gives `frequencies`, and has static fields only."""

    @abc.abstractmethod
    def frequencies(self, dim: int, theta: Any) -> Any:
        """Radians per position of each pair.

        **Arguments:**

        - `dim`: how many features turn.
        - `theta`: a Python float, or a floating-point scalar array.

        **Returns:** `[dim/2]`; a NumPy array of float64 if `theta` is a Python float.
        """

    def amplitude(self) -> float:
        """What turned queries and keys are multiplied with, each."""
        return 1.0


class LinearScaling(AbstractRotaryScaling):
    """Positions divided by `factor`, that is, position interpolation (Chen et al.,
    arXiv:2306.15595).

    **Arguments:**

    - `factor`: the new context over that trained on.
    """

    factor: float = eqx.field(static=True)

    def __check_init__(self) -> None:
        _numbers(self)

    def frequencies(self, dim: int, theta: Any) -> Any:
        return plain_frequencies(dim, theta) / self.factor


class NTKScaling(AbstractRotaryScaling):
    """`theta` times `factor^(dim/(dim-2))`: the fastest pair keeps its frequency, that of the
    slowest is divided by `factor` (the "NTK-aware" interpolation, described in arXiv:2309.00071).

    "Dynamic NTK" for a context of `n` tokens, of which `m` were trained on, is this with the factor
    `factor * n / m - (factor - 1)`.

    **Arguments:**

    - `factor`: the new context over that trained on.
    """

    factor: float = eqx.field(static=True)

    def __check_init__(self) -> None:
        _numbers(self)

    def frequencies(self, dim: int, theta: Any) -> Any:
        if dim <= 2:
            raise ValueError(f"NTKScaling needs more than one pair of features, got dim={dim}.")
        return plain_frequencies(dim, theta * self.factor ** (dim / (dim - 2)))


class YaRNScaling(AbstractRotaryScaling):
    """Fast pairs keep their frequency, slow ones are divided by `factor`, those between are mixed,
    and logits grow (Peng et al., *YaRN*, arXiv:2309.00071).

    The mix is linear in the index of the pair, as in the authors' code and the models in use; the
    paper's formula is linear in the number of turns.

    **Arguments:**

    - `factor`: the new context over that trained on.
    - `original_length`: the context trained on.
    - `beta_fast`, `beta_slow`: pairs that turn more often than `beta_fast` times within
        `original_length` are fast, less often than `beta_slow` times slow.
    - `attention_factor`: what turned queries and keys are multiplied with, by default
        `0.1 * log(factor) + 1`, or 1 for a factor below 1.
    - `truncate`: whether the bounds of the mix are rounded to whole pairs.
    """

    factor: float = eqx.field(static=True)
    original_length: int = eqx.field(static=True)
    beta_fast: float = eqx.field(static=True, default=32.0)
    beta_slow: float = eqx.field(static=True, default=1.0)
    attention_factor: float | None = eqx.field(static=True, default=None)
    truncate: bool = eqx.field(static=True, default=True)

    def __check_init__(self) -> None:
        _numbers(self)
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"beta_fast must be at least beta_slow, got {self.beta_fast} and {self.beta_slow}."
            )

    def frequencies(self, dim: int, theta: Any) -> Any:
        xp: Any = np if isinstance(theta, float) else jnp

        def pair(turns: float) -> Any:
            """The (fractional) index of the pair that turns so often within `original_length`."""
            return (
                dim * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * xp.log(theta))
            )

        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = xp.floor(low), xp.ceil(high)
        low, high = xp.maximum(low, 0.0), xp.minimum(high, dim - 1.0)
        plain = plain_frequencies(dim, theta)
        index = xp.arange(dim // 2, dtype=plain.dtype)
        width = xp.where(high > low, high - low, 0.001)  # a step where there is nothing between
        slow = xp.clip((index - low) / width, 0.0, 1.0)
        return plain / self.factor * slow + plain * (1 - slow)

    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return float(self.attention_factor)
        return 0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0


class Llama3Scaling(AbstractRotaryScaling):
    """Wavelengths below `original_length / high_freq_factor` keep their frequency. Above
    `original_length / low_freq_factor` it is divided by `factor`. Between them it is mixed,
    linearly in the number of turns (Llama 3.1, in Meta's code `apply_scaling`).

    **Arguments:**

    - `factor`: by how much low frequencies are divided; 8 in Llama 3.1, 32 in the small 3.2.
    - `low_freq_factor`, `high_freq_factor`: the bounds above.
    - `original_length`: the context trained on.
    """

    factor: float = eqx.field(static=True, default=8.0)
    low_freq_factor: float = eqx.field(static=True, default=1.0)
    high_freq_factor: float = eqx.field(static=True, default=4.0)
    original_length: int = eqx.field(static=True, default=8192)

    def __check_init__(self) -> None:
        _numbers(self)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                "high_freq_factor must be more than low_freq_factor, got "
                f"{self.high_freq_factor} and {self.low_freq_factor}."
            )

    def frequencies(self, dim: int, theta: Any) -> Any:
        xp: Any = np if isinstance(theta, float) else jnp
        plain = plain_frequencies(dim, theta)
        turns = plain * (self.original_length / (2 * math.pi))
        span = self.high_freq_factor - self.low_freq_factor
        fast = xp.clip((turns - self.low_freq_factor) / span, 0.0, 1.0)
        return plain / self.factor * (1 - fast) + plain * fast
