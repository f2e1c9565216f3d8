"""What `supports` answers."""

from typing import NamedTuple


class Support(NamedTuple):
    """Whether a strategy can do something, and if not, why.

    **Arguments:**

    - `ok`: whether it can.
    - `reason`: what `attention` would raise; empty if `ok`.
    """

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok
