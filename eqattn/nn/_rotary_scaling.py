"""How rotary frequencies change for contexts longer than those trained on.

Each formula is written once, for NumPy and `jax.numpy`. Frequencies are a NumPy array if `theta` is
a Python float, so that angles can be reduced exactly. For a traced `theta` they are a traced array.
"""

import abc
import math
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from .._misc import as_flag
from .._misc.text import without_defaults


def plain_frequencies(dim: int, theta: Any) -> Any:
    """The frequencies `theta^(-2i/dim)` of each pair `i`, in radians per position."""
    exponents = -np.arange(0, dim, 2) / max(dim, 1)
    if isinstance(theta, float):
        return theta**exponents
    return theta ** jnp.asarray(exponents, theta.dtype)


def frequencies_of(
    sections: tuple[int, ...], theta: Any, scaling: "AbstractRotaryScaling | None"
) -> Any:
    """The frequencies of sections of so many pairs, `[pairs]`. Each section has its own."""
    of = plain_frequencies if scaling is None else scaling.frequencies
    # An axis by which nothing turns has no frequencies, which a scaling may refuse to make.
    parts = [of(2 * pairs, theta) for pairs in sections if pairs] or [plain_frequencies(0, theta)]
    known = all(isinstance(x, np.ndarray) for x in parts)
    return (np if known else jnp).concatenate(parts)


def _plain(x: Any) -> Any:
    """A number of NumPy as one of Python. The former would make a `theta` a number of few bits."""
    return x.item() if isinstance(x, np.number) else x


def _numbers(module: Any, least: float = 0.0) -> None:
    """Checks that all fields that are numbers are finite and above `least`."""
    for name in module.__dataclass_fields__:
        value = getattr(module, name)
        if name == "truncate":
            as_flag(value, name)
            continue
        if value is None and name == "attention_factor":
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name} is a Python number: it is static. Got {value!r}.")
        if not least < value < math.inf:
            raise ValueError(f"{name} must be finite and above {least:g}, got {value}.")


class AbstractRotaryScaling(eqx.Module):
    """The base of all scalings. A subclass defines `frequencies`, and has static fields only."""

    __pdoc__ = without_defaults

    @abc.abstractmethod
    def frequencies(self, dim: int, theta: Any) -> Any:
        """Computes the frequency of each pair, in radians per position.

        **Arguments:**

        - `dim`: how many features turn.
        - `theta`: a Python float, or a floating-point scalar array.

        **Returns:** `[dim/2]`. It is a NumPy array of float64 if `theta` is a Python float.
        """

    def amplitude(self) -> float:
        """The factor by which turned queries, and turned keys, are multiplied."""
        return 1.0


class LinearScaling(AbstractRotaryScaling):
    """Divides positions by `factor`. This is position interpolation (Chen et al.,
    arXiv:2306.15595).

    **Arguments:**

    - `factor`: the length of the new context over that of the context trained on.
    """

    factor: float = eqx.field(static=True, converter=_plain)

    def __check_init__(self) -> None:
        _numbers(self)

    def frequencies(self, dim: int, theta: Any) -> Any:
        return plain_frequencies(dim, theta) / self.factor


class NTKScaling(AbstractRotaryScaling):
    """Multiplies `theta` by `factor^(dim/(dim-2))`. The fastest pair keeps its frequency, and that
    of the slowest is divided by `factor`. This is the "NTK-aware" interpolation that is described
    in arXiv:2309.00071.

    The exponent follows from the slowest pair, `i = dim/2 - 1`. Its frequency is
    `theta^(-(dim-2)/dim)`, so that multiplying `theta` by `factor^(dim/(dim-2))` divides it by
    `factor`.

    "Dynamic NTK" for a context of `n` tokens, of which `m` were trained on, is this with the factor
    `factor * n / m - (factor - 1)`.

    **Arguments:**

    - `factor`: the length of the new context over that of the context trained on.
    """

    factor: float = eqx.field(static=True, converter=_plain)

    def __check_init__(self) -> None:
        _numbers(self)

    def frequencies(self, dim: int, theta: Any) -> Any:
        if dim <= 2:
            raise ValueError(
                "NTKScaling needs more than one pair of features, and with axial=True in each "
                f"section, got dim={dim}."
            )
        return plain_frequencies(dim, theta * self.factor ** (dim / (dim - 2)))


class YaRNScaling(AbstractRotaryScaling):
    """Keeps the frequencies of fast pairs, divides those of slow pairs by `factor`, and mixes both
    for the pairs between. It also makes logits larger (Peng et al., *YaRN*, arXiv:2309.00071).

    The mix is linear in the index of the pair, as in the authors' code and the models in use. The
    paper's formula is linear in the number of turns.

    **Arguments:**

    - `factor`: the length of the new context over that of the context trained on.
    - `original_length`: the length of the context trained on.
    - `beta_fast`, `beta_slow`: numbers of turns within `original_length`. Pairs that turn more
        often than `beta_fast` times are fast, and less often than `beta_slow` times slow.
    - `attention_factor`: the factor by which turned queries, and turned keys, are multiplied. The
        default is `0.1 * log(factor) + 1`, or 1 for a factor below 1.
    - `truncate`: whether the bounds of the mix are rounded to whole pairs.
    """

    factor: float = eqx.field(static=True, converter=_plain)
    original_length: int = eqx.field(static=True, converter=_plain)
    beta_fast: float = eqx.field(static=True, converter=_plain, default=32.0)
    beta_slow: float = eqx.field(static=True, converter=_plain, default=1.0)
    attention_factor: float | None = eqx.field(static=True, converter=_plain, default=None)
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
            """The (fractional) index of the pair that turns so often within `original_length`: the
            solution `i` of `original_length * theta^(-2i/dim) = 2 pi turns`.
            """
            return (
                dim * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * xp.log(theta))
            )

        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = xp.floor(low), xp.ceil(high)
        low, high = xp.maximum(low, 0.0), xp.minimum(high, dim - 1.0)
        plain = plain_frequencies(dim, theta)
        index = xp.arange(dim // 2, dtype=plain.dtype)
        width = xp.where(high > low, high - low, 0.001)  # a step where no pair is between
        slow = xp.clip((index - low) / width, 0.0, 1.0)
        return plain / self.factor * slow + plain * (1 - slow)

    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return float(self.attention_factor)
        return 0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0


class Llama3Scaling(AbstractRotaryScaling):
    """Keeps the frequency of pairs with a wavelength below `original_length / high_freq_factor`.
    Above `original_length / low_freq_factor` it is divided by `factor`. Between them both are
    mixed, linearly in the number of turns. This is `apply_scaling` of Meta's code for Llama 3.1.

    **Arguments:**

    - `factor`: by how much low frequencies are divided. It is 8 in Llama 3.1, and 32 in the small
        models of Llama 3.2.
    - `low_freq_factor`, `high_freq_factor`: the numbers of turns within `original_length` between
        which frequencies are mixed.
    - `original_length`: the length of the context trained on.
    """

    factor: float = eqx.field(static=True, converter=_plain, default=8.0)
    low_freq_factor: float = eqx.field(static=True, converter=_plain, default=1.0)
    high_freq_factor: float = eqx.field(static=True, converter=_plain, default=4.0)
    original_length: int = eqx.field(static=True, converter=_plain, default=8192)

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
