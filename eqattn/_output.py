"""The results of a call of attention."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, TYPE_CHECKING

import equinox as eqx
from jaxtyping import Array, Float

from ._carry import Carry


# A field that was not asked for holds None. Type checkers cannot know what a call asked for. For
# them such a field has the type `Any`, so that callers use it without a cast.
_NOTHING: Any = None
if TYPE_CHECKING:
    _Outputs = Float[Array, "*b t h v"]
    _NotAsked = Any
else:
    _Outputs = Float[Array, "*b t h v"] | None
    _NotAsked = None


class AttentionOutput(eqx.Module):
    """The results of one call of attention. A field that was not asked for is None.

    **Arguments:**

    - `attention_weights`: the attention probabilities, `[*b, h, t, s]`.
    - `attention_outputs`: the weighted means of the values, `[*b, t, h, v]`.
    - `logsumexp`: the logsumexp of the logits over the keys, `[*b, t, h]`; `-inf` where no key is
        visible.
    - `carry`: the mergeable form of the result, a [`Carry`][eqattn.Carry].
    - `max_logits`: the largest logit of the keys that each query sees, `[*b, t, h]`; `-inf` where
        no key is visible. Sinks do not count, and no gradient flows through it.
    """

    attention_weights: Float[Array, "*b h t s"] | _NotAsked = None
    attention_outputs: _Outputs = _NOTHING
    logsumexp: Float[Array, "*b t h"] | _NotAsked = None
    carry: Carry | _NotAsked = None
    max_logits: Float[Array, "*b t h"] | _NotAsked = None

    def replace(self, **kwargs: Any) -> "AttentionOutput":
        """Returns a copy with some fields changed. **Raises:** `TypeError` for an unknown name."""
        return dataclasses.replace(self, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """All fields as strict JSON data; `from_dict` restores them bit for bit.

        Arrays keep their dtype but not their sharding.

        **Raises:** `TypeError` for traced and abstract arrays.
        """
        from ._config.json import encode  # Few programs write or read outputs.

        return {name: encode(getattr(self, name)) for name in self.__dataclass_fields__}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "AttentionOutput":
        """The output that `to_dict` wrote. **Raises:** `ValueError` for an unknown name."""
        from ._config.json import check_names, decode

        check_names(cls, data)
        values = {name: decode(value) for name, value in data.items()}
        carry = values.get("carry")
        if isinstance(carry, Mapping):
            check_names(Carry, carry)
            values["carry"] = Carry(**carry)
        return cls(**values)

    def to_json(self, **kwargs: Any) -> str:
        """Writes the data of `to_dict` as strict JSON text. `kwargs` are passed to `json.dumps`."""
        return json.dumps(self.to_dict(), **{"allow_nan": False, **kwargs})

    @classmethod
    def from_json(cls, json_str: str) -> "AttentionOutput":
        """The output that `to_json` wrote."""
        return cls.from_dict(json.loads(json_str))
