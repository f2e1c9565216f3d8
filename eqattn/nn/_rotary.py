"""Rotary position embeddings, accurate at any position.

How rotary frequencies change for contexts longer than those trained on.

Each formula is written once, for NumPy and `jax.numpy`. Frequencies are a NumPy array if `theta` is
a Python float, so that angles can be reduced exactly. For a traced `theta` they are a traced array.
"""

import abc
import functools as ft
import math
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from .._misc import (
    accumulation_dtype,
    as_array,
    as_flag,
    as_int32,
    as_sizes,
    Static,
    unwrap,
    without_defaults,
)


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


def rotary(
    x: Float[Array, "*b t h d"],
    positions: Any,
    theta: Any = 10_000.0,
    *,
    scaling: AbstractRotaryScaling | None = None,
    dim: int | None = None,
    interleaved: bool = False,
    sections: Sequence[int] | None = None,
    axial: bool = False,
) -> Float[Array, "*b t h d"]:
    r"""Applies rotary position embedding: turns pairs of features by angles proportional to the
    position.

    Pair `i` of position `p` turns by `p * theta^(-2i/dim)` radians. So products of queries and keys
    depend on the difference of their positions only. The function is pure: nothing is cached, and a
    position has the same angle at any offset and length.

    With integer positions and a Python number `theta`, angles are reduced to one turn exactly, in
    integers. At any int32 position they are right to the last digits of float32. With float
    positions or an array `theta`, the angle is a product in float32 (float64 for float64 `x`). Its
    error is then about 6e-8, the rounding of float32, times the whole angle.

    **Arguments:**

    - `x`: queries or keys, `[*b, t, h, d]`.
    - `positions`: the positions of the rows, `[t]` or `[*b, t]`. They are integers or floats, of
        any size and sign.
    - `theta`: the base of the frequencies: a number above 1, or a scalar array, which may be
        traced.
    - `scaling`: how frequencies change for contexts longer than those trained on: a
        [`LinearScaling`][eqattn.nn.LinearScaling], [`NTKScaling`][eqattn.nn.NTKScaling],
        [`YaRNScaling`][eqattn.nn.YaRNScaling] or [`Llama3Scaling`][eqattn.nn.Llama3Scaling].
    - `dim`: how many features turn, an even number. The others stay as they are. By default all
        turn.
    - `interleaved`: whether a pair is `(2i, 2i + 1)` instead of `(i, i + dim/2)`.
    - `sections`: how many pairs turn by each axis of positions, in their order, for images and
        video: `(16, 24, 24)` for time, height and width in Qwen2-VL (M-RoPE). The positions are
        `[t, axes]` or `[*b, t, axes]` then. The frequencies stay those of all pairs.
    - `axial`: whether frequencies restart in each section instead: pair `j` of a section of `n`
        pairs turns by `theta^(-2j/(2n))`. A `scaling` then applies to each section by itself. Flux
        has the sections `(8, 28, 28)` and `interleaved=True`.

    **Returns:**

    `x` after the turn, in its dtype. The arithmetic is float32 or wider.

    **Raises:**

    `ValueError` or `TypeError` at trace time; the message names the shapes and the remedy.

    ??? cite "Reference"

        Su et al., *RoFormer: Enhanced Transformer with Rotary Position Embedding*, 2021
        (arXiv:2104.09864). Pairs are `(i, i + dim/2)` in GPT-NeoX and in Hugging Face's Llama,
        interleaved in the paper, in GPT-J and in Meta's Llama. `sections`: Wang et al., *Qwen2-VL*,
        2024 (arXiv:2409.12191), section 2.1, with `axial` in its vision encoder. `axial`: Heo et
        al., *Rotary position embedding for vision transformer*, 2024 (arXiv:2403.13298).
    """
    x = as_array(x, "x")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x must be floating point, got {x.dtype}; cast it first.")
    if x.ndim < 3:
        raise ValueError(
            f"x must be [*batch, tokens, heads, dim], got shape {x.shape}; add a heads axis of "
            "size 1 for a single head."
        )
    dim = turned(dim, x.shape[-1])
    theta, interleaved = as_theta(theta), as_flag(interleaved, "interleaved")
    _check_scaling(scaling)
    sizes, axial = as_sections(sections, axial, dim)
    positions = _positions_of_pairs(positions, x.shape, sizes)
    dtype = accumulation_dtype(x.dtype)
    if not isinstance(theta, float) and jnp.finfo(theta.dtype).bits < jnp.finfo(dtype).bits:
        theta = jnp.asarray(theta, dtype)
    parts = sizes if sizes is not None and axial else (dim // 2,)
    frequencies = frequencies_of(parts, theta, scaling)
    exact = isinstance(frequencies, np.ndarray) and jnp.issubdtype(positions.dtype, jnp.integer)
    if exact and dtype == jnp.float32:
        frequencies = _in_turns(frequencies)
    else:
        frequencies = (jnp.asarray(frequencies).astype(dtype),)
    amplitude = 1.0 if scaling is None else scaling.amplitude()
    return _rotated(x, positions, frequencies, amplitude, dim, interleaved)


class Rotary(eqx.Module):
    """A module that holds the arguments of [`eqattn.nn.rotary`][], for a layer to be built with.

    It has no leaves, unless `theta` is an array. The array is then learned, or varies along the
    layers of a `jax.lax.scan`.

    **Arguments:** `theta`, `scaling`, `dim`, `interleaved`, `sections` and `axial`, as in `rotary`.

    A layer counts tokens, but not their coordinates. So with `sections` each of its calls gives
    `q_positions` of `[t, axes]`. In a call of [`eqattn.nn.MultiheadAttention`][] that brings keys,
    there are also `kv_positions` of `[s, axes]`.

    **Raises:** `ValueError` or `TypeError`; the message names the remedy.
    """

    __pdoc__ = without_defaults

    _theta: Any
    scaling: AbstractRotaryScaling | None
    dim: int | None = eqx.field(static=True)
    interleaved: bool = eqx.field(static=True)
    sections: tuple[int, ...] | None = eqx.field(static=True)
    axial: bool = eqx.field(static=True)

    def __init__(
        self,
        theta: Any = 10_000.0,
        *,
        scaling: AbstractRotaryScaling | None = None,
        dim: int | None = None,
        interleaved: bool = False,
        sections: Sequence[int] | None = None,
        axial: bool = False,
    ):
        theta = as_theta(theta)
        self._theta = Static(theta) if isinstance(theta, float) else theta
        _check_scaling(scaling)
        if dim is not None:
            turned(dim, max(dim, 0) if isinstance(dim, int) else 0)
        self.scaling = scaling
        self.dim = dim
        self.interleaved = as_flag(interleaved, "interleaved")
        self.sections, self.axial = as_sections(sections, axial, dim)

    @property
    def theta(self) -> Any:
        return unwrap(self._theta)

    def __call__(self, x: Float[Array, "*b t h d"], positions: Any) -> Float[Array, "*b t h d"]:
        """Calls `rotary(x, positions, ...)`."""
        return rotary(
            x,
            positions,
            self.theta,
            scaling=self.scaling,
            dim=self.dim,
            interleaved=self.interleaved,
            sections=self.sections,
            axial=self.axial,
        )


@ft.partial(jax.jit, static_argnames=("amplitude", "dim", "interleaved"))
def _rotated(
    x: Array,
    positions: Array,
    frequencies: tuple[Any, ...],
    amplitude: float,
    dim: int,
    interleaved: bool,
) -> Array:
    """What `rotary` returns, as one program where it is called outside of `jax.jit`.

    **Arguments:**

    - `positions`: those of all pairs, `[..., t, 1]`, or of each pair, `[..., t, dim/2]`.
    - `frequencies`: what `_in_turns` returns, or radians per position, each `[dim/2]`.
    """
    dtype = accumulation_dtype(x.dtype)
    lead = positions.shape[:-1]
    shape = (1,) * (positions.ndim - 1) + (dim // 2,)
    frequencies = tuple(f.reshape(shape) for f in frequencies)
    if len(frequencies) == 2:
        angles = _reduced_angles(positions, *frequencies)
    else:
        angles = positions.astype(dtype) * frequencies[0]
    angles = angles.reshape((1,) * (x.ndim - 2 - len(lead)) + (*lead, 1, dim // 2))
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if amplitude != 1.0:
        cos, sin = cos * amplitude, sin * amplitude
    turning = _turn(x[..., :dim].astype(dtype), cos, sin, interleaved).astype(x.dtype)
    return turning if dim == x.shape[-1] else jnp.concatenate([turning, x[..., dim:]], -1)


def _turn(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """Turns all pairs of features `[..., dim]` by angles, whose `cos` and `sin` are
    `[..., dim/2]`.
    """
    if interleaved:
        left, right = x[..., 0::2], x[..., 1::2]
    else:
        left, right = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    new = left * cos - right * sin, right * cos + left * sin
    return jnp.stack(new, -1).reshape(x.shape) if interleaved else jnp.concatenate(new, -1)


def _positions_of_pairs(
    positions: Any, shape: tuple[int, ...], sizes: tuple[int, ...] | None
) -> Array:
    """The positions of queries or keys of some shape: one for all pairs of features, `[..., t, 1]`.
    With sections of these sizes there is one for each pair, `[..., t, dim/2]`.
    """
    positions = as_array(positions, "positions")
    if jnp.issubdtype(positions.dtype, jnp.integer):
        positions = as_int32(positions, "positions")
    elif not jnp.issubdtype(positions.dtype, jnp.floating):
        raise TypeError(f"positions must be integers or floats, got {positions.dtype}.")
    positions = jnp.asarray(positions)
    *batch, t = shape[:-2]
    form, axes = ("t", ()) if sizes is None else ("t, axes", (len(sizes),))
    if positions.shape not in ((t, *axes), (*batch, t, *axes)):
        raise ValueError(
            f"positions must be [{form}] = {(t, *axes)} or [*b, {form}] = {(*batch, t, *axes)} for "
            f"x of shape {shape} with sections={sizes}, got shape {positions.shape}."
        )
    if sizes is None:
        return positions[..., None]
    return positions[..., np.repeat(np.arange(len(sizes)), sizes)]


def as_sections(sections: Any, axial: Any, dim: int | None) -> tuple[tuple[int, ...] | None, bool]:
    """Returns `sections` and `axial`, checked for `dim` features that turn, unless that is None."""
    axial = as_flag(axial, "axial")
    if sections is None:
        if axial:
            raise ValueError(
                "axial=True restarts frequencies in each section: pass sections= too, such as "
                "sections=(16, 16) for the height and width of 64 features."
            )
        return None, axial
    sizes = as_sizes(sections, "sections")
    if dim is not None and sum(sizes) != dim // 2:
        raise ValueError(
            f"sections must add up to the {dim // 2} pairs of {dim} features that turn, got "
            f"{sizes}, {sum(sizes)} pairs; dim= says how many features turn."
        )
    return sizes, axial


def _check_scaling(scaling: Any) -> None:
    if scaling is not None and not isinstance(scaling, AbstractRotaryScaling):
        raise TypeError(
            f"scaling must be a module such as YaRNScaling(factor, original_length), got "
            f"{scaling!r}."
        )


def check_rotary(given: Any, size: int) -> None:
    """**Raises:** `TypeError` or `ValueError` unless a layer may have this `Rotary`, or None, for
    heads of this size.
    """
    if given is None:
        return
    if not isinstance(given, Rotary):
        raise TypeError(f"rotary must be a Rotary, such as Rotary(10_000), got {given!r}.")
    as_sections(given.sections, given.axial, turned(given.dim, size))


def turned(dim: int | None, size: int) -> int:
    """How many of `size` features turn. **Raises:** `ValueError` unless they are whole pairs."""
    chosen = size if dim is None else dim
    if not isinstance(chosen, int | np.integer) or isinstance(chosen, bool):
        raise TypeError(f"dim must be an even int, or None for all features, got {dim!r}.")
    if chosen % 2 or not 0 <= chosen <= size:
        raise ValueError(
            f"Rotary positions turn pairs: dim must be an even number up to the head's {size}, got "
            f"{chosen}; pass dim= to turn only the first features."
        )
    return int(chosen)


def as_theta(theta: Any) -> Any:
    """Returns `theta` as a float or a scalar array, checked."""
    if isinstance(theta, int | float | np.number) and not isinstance(theta, bool):
        if not 1 < theta < math.inf:
            raise ValueError(f"theta must be a number above 1, got {theta}.")
        return float(theta)
    dtype = getattr(theta, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating) or jnp.shape(theta) != ():
        raise TypeError(f"theta must be a number or a floating-point scalar array, got {theta!r}.")
    return theta


def _in_turns(frequencies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Frequencies as fixed-point numbers of 64 bits, in two words: `high` and `low`, in uint32.

    frequency / (2 pi) mod 1  =  high / 2^32 + low / 2^64
    """
    turns = frequencies / (2 * np.pi) % 1.0 * 2.0**32
    high = np.floor(turns)
    low = np.floor((turns - high) * 2.0**32)
    return high.astype(np.uint32), low.astype(np.uint32)


def _reduced_angles(positions: Array, high: Array, low: Array) -> Array:
    """Angles in `[-pi, pi]`, reduced exactly before they are rounded to float32.

    The frequencies are those of `_in_turns`. The angle of position `p`, as a fraction of a turn in
    units of 2^-32, is

        p * high + floor(p * low / 2^32)   modulo 2^32, which are whole turns,

    and uint32 arithmetic wraps around by itself. For example, a frequency of 3/8 of a turn has
    `high = 3 * 2^29`. Position 3 gets `9 * 2^29 mod 2^32 = 2^29`, that is 1/8 of a turn.

    Two terms are left out. What `low` lacks is below 2^-64 turns, and is multiplied by `p < 2^31`.
    The floor takes less than one unit of 2^-32 turns, or 1.5e-9 radians. Two roundings are larger:
    of the angle to float32 and, at large positions, of the frequencies to float64. Errors were
    measured against `numpy.longdouble`, for `theta` from 1e4 to 1e6 and 64 and 128 features. At
    4,000 random positions of either sign they were up to 3.0e-7 below 2^20, and up to 5.7e-7 below
    2^31.
    """
    distance = lax.bitcast_convert_type(jnp.abs(positions), jnp.uint32)
    phase = distance * high + _upper_product(distance, low)
    # Read as a signed integer, the fraction of a turn is in [-1/2, 1/2).
    angle = lax.bitcast_convert_type(phase, jnp.int32).astype(jnp.float32)
    angle = angle * np.float32(2 * np.pi / 2.0**32)
    return jnp.where(positions < 0, -angle, angle)


def _upper_product(a: Array, b: Array) -> Array:
    """Returns the upper 32 of the 64 bits that a product of uint32s has.

    With 16-bit halves, the product is the sum of four products, each of which fits in 32 bits:

        a * b = 2^32 a1 b1 + 2^16 (a1 b0 + a0 b1) + a0 b0

    `middle` adds a1 b0 and the carry out of a0 b0; `other` adds a0 b1 and the lower half of
    `middle`. Neither can overflow: (2^16 - 1)^2 + 2^16 - 1 < 2^32.
    """
    half, lower = np.uint32(16), np.uint32(0xFFFF)
    a1, a0, b1, b0 = a >> half, a & lower, b >> half, b & lower
    middle = a1 * b0 + (a0 * b0 >> half)
    other = a0 * b1 + (middle & lower)
    return a1 * b1 + (middle >> half) + (other >> half)
