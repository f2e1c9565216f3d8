"""The positions of the tokens of a layer's inputs in their sequence."""

from typing import Any

import jax.numpy as jnp

from ..cache import AbstractCache
from ..cache._base import new_positions
from ..masks._base import AbstractMask
from ..masks._terms import moved_positions
from ..strategies import AttentionImpl
from ._rotary import Rotary


_Pair = tuple[Any, Any]


def input_positions(
    rotary: Rotary | None,
    strategy: AttentionImpl | None,
    cache: AbstractCache | None,
    mask: AbstractMask | None,
    lengths: tuple[int, int],
    given: _Pair,
    processed: bool,
) -> tuple[_Pair, _Pair]:
    """The positions of the queries and of the new keys, once for rotary embeddings, and once for
    masks and scores.

    Both are the same, unless the `rotary` of the layer has sections. Then the caller gives
    coordinates, which are for it alone. Masks and scores see the tokens in their order.

    **Arguments:**

    - `lengths`: how many queries and new keys there are.
    - `given`: their positions as the caller gives them, or None. With None they follow from the
        cache, or from the strategy: a ring in zigzag, for example, reads arrays in another order.
    - `processed`: whether a function of the caller's sees queries and keys.

    **Returns:** two pairs. Those for rotary embeddings have None if there is no `rotary`. Those for
    masks and scores have None where the call gives none.

    **Raises:** `ValueError` if strategy and cache disagree about the order, if the caller's
    function cannot know it, or if there are no coordinates.
    """
    lying = [None if strategy is None else strategy.token_positions(n) for n in lengths]
    in_order = all(x is None for x in lying)
    name = type(strategy).__name__
    if cache is not None and not in_order:
        raise ValueError(
            f"A cache keeps tokens in their order, and this {name} takes those of an array for "
            "others, by its layout or inside of your jax.shard_map (see its token_positions). For "
            "calls with a cache use another strategy: with_strategy(model, None)."
        )
    if processed and not in_order and any(x is None for x in given):
        raise ValueError(
            f"process_heads cannot see that this {name} takes the tokens of an array for others "
            "than the first, second, ...: by its layout, or inside of your jax.shard_map. Turn "
            "queries and keys by positions = strategy.token_positions(tokens), and pass them as "
            "q_positions= and kv_positions= too, which says that they are right; or give the layer "
            "rotary=Rotary(...), which knows them."
        )

    if rotary is not None and rotary.sections is not None:
        return _coordinates(rotary.sections, lengths, given), (None, None)
    if cache is not None and given[1] is not None:
        raise ValueError("kv_positions: the cache knows those of its keys; leave them out.")
    if rotary is None:
        return (None, None), given

    def positions(n: int, given: Any, lying: Any) -> Any:
        if given is None and cache is not None:
            given = new_positions(cache, n)
        elif given is None:
            given = jnp.arange(n) if lying is None else lying
        return moved_positions(mask, given)

    q, kv = map(positions, lengths, given, lying)
    return (q, kv), given


def _coordinates(sections: tuple[int, ...], lengths: tuple[int, int], given: _Pair) -> _Pair:
    """The coordinates of the queries and of the new keys, `[n, axes]` or `[*b, n, axes]`."""
    axes, found = len(sections), []
    for name, n, x in zip(("q_positions", "kv_positions"), lengths, given):
        if x is None and n:
            raise ValueError(
                f"The layer's Rotary has sections={sections}, so each token has {axes} "
                f"coordinates, which neither an order of tokens nor a cache tells: give {name}= "
                f"of shape {(n, axes)}."
            )
        # A call that only reads a cache brings no keys, and so no coordinates.
        found.append(jnp.zeros((n, axes), jnp.int32) if x is None else x)
    return found[0], found[1]
