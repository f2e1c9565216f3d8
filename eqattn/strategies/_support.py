"""`Support`, the answer of a strategy's `supports`."""

from typing import NamedTuple


class Support(NamedTuple):
    """Whether a strategy can do something, and if not, why. It is true or false as `ok` is.

    **Arguments:**

    - `ok`: whether the strategy can do it.
    - `reason`: the message that `attention` would raise; empty if `ok`.
    """

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok
