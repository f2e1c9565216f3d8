"""`Support`, the answer of a strategy's `supports`."""

from collections.abc import Mapping
from typing import Any, NamedTuple


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


BITS = ("batch", "capacity", "chunks", "decode", "devices", "layout")
"""What the bits of a row may not depend on, see the page on numerics."""

_REMEDIES = {
    True: "use Ragged(metadata, bitwise=True)",
    "devices": "use AllGather(metadata, bitwise=True)",
    "layout": "use Ragged(metadata, bitwise=True)",
}


def without_library(strategy: Any, name: str) -> str:
    """Why a strategy does not run a platform that is code of others; empty if it does."""
    if name in strategy.libraries:
        return ""
    return (
        f"platform={name!r}: {type(strategy).__name__} needs parts of the result that it does not "
        "return; use Blockwise(metadata), or platform='xla' or 'auto'."
    )


def varying_bits(strategy: Any, features: Mapping[str, Any]) -> Support:
    """Whether the bits of a row are independent of what `features["bitwise"]` names, if anything.

    **Raises:** `ValueError` for a name that is not in `BITS`.
    """
    kind = features.get("bitwise")
    if kind not in (None, True, *BITS):
        raise ValueError(
            f"bitwise must be one of {BITS}, or True for all but devices, got {kind!r}."
        )
    promised = strategy.promises if getattr(strategy, "bitwise", False) else frozenset()
    asked = {None: set(), True: {*BITS} - {"devices"}}.get(kind, {kind})
    if promised and features.get("dropout") and "batch" in asked:
        return Support(
            False,
            "bitwise: what dropout drops depends on the place in the batch, and so do the bits; "
            "leave it out.",
        )
    missing = [name for name in BITS if name in asked and name not in promised]
    if not missing:
        return Support(True, "")
    remedy = _REMEDIES.get(kind, "use Ragged(metadata, bitwise=True), or Blockwise in the same way")
    reason = (
        f"bitwise: {type(strategy).__name__} may give a row other bits where it depends on "
        f"{', '.join(missing)}; {remedy}."
    )
    return Support(False, reason)
