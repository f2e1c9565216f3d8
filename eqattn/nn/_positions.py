"""The positions of the tokens of a layer's inputs in their sequence."""

from typing import Any

import jax.numpy as jnp

from ..cache import AbstractCache
from ..cache._base import new_positions
from ..strategies import AttentionImpl


def input_positions(
    strategy: AttentionImpl | None,
    cache: AbstractCache | None,
    lengths: tuple[int, int],
    given: tuple[Any, Any],
    processed: bool,
) -> tuple[Any, Any]:
    """The positions of the queries and of the new keys, which rotary embeddings need.

    **Arguments:**

    - `lengths`: how many queries and new keys there are.
    - `given`: their positions as the caller gives them, or None. With None they follow from the
        cache, or from the strategy: a ring in zigzag, for example, reads arrays in another order.
    - `processed`: whether a function of the caller's sees queries and keys.

    **Raises:** `ValueError` if strategy and cache disagree about the order, or if the caller's
    function cannot know it.
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

    def positions(n: int, given: Any, lying: Any) -> Any:
        if given is not None:
            return given
        if cache is not None:
            return new_positions(cache, n)
        return jnp.arange(n) if lying is None else lying

    q, kv = map(positions, lengths, given, lying)
    return q, kv
