"""How many blocks of a mask are live, as far as its arrays are known on the host."""

import numpy as np

from .._misc import concrete
from .._pairs import canonical
from .._problem.bound import BoundMask
from ..masks._base import AbstractMask, And, Or


def counted_blocks(
    mask: AbstractMask | None,
    tokens: int,
    block: int,
    batch: int,
    heads: int,
    padding: int = 0,
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Which blocks of queries and keys hold a visible pair, with the ids of tokens that are known.

    **Arguments:**

    - `mask`: the mask, of which all terms whose arrays are not traced are counted.
    - `tokens`: how many queries there are, and as many keys: a multiple of `block`.
    - `block`: the tokens of a block.
    - `batch`, `heads`: the sizes that arrays of the mask may have.
    - `padding`: how many of the tokens the arrays of the mask lack. They are as the last one.

    **Returns:** bool `[batch|1, heads|1, blocks, blocks]`, and the names of the terms that were not
    counted, as if they showed every pair.
    """
    if isinstance(mask, And | Or):
        each = [counted_blocks(term, tokens, block, batch, heads, padding) for term in mask.terms]
        live = each[0][0]
        for more, _ in each[1:]:
            live = live & more if isinstance(mask, And) else live | more
        return live, tuple(dict.fromkeys(name for _, names in each for name in names))
    blocks = tokens // block
    anything = np.ones((1, 1, blocks, blocks), bool)
    if mask is None:
        return anything, ()
    # Imported on first use, as it takes half of the time that importing eqattn takes.
    from ..masks._intervals.classify import classify

    name, operands, length = type(mask).__name__, mask.operands(), tokens - padding
    # A list of keys is no function of a pair.
    if mask.selects or any(concrete(o.array) is None for o in operands):
        return anything, (name,)
    arrays = [np.asarray(canonical(o, (batch,), heads, length, length, name)) for o in operands]
    widths = [
        [(0, 0), (0, 0), *[(0, padding * (n > 1)) for n in x.shape[2:4]], *[(0, 0)] * (x.ndim - 4)]
        for x in arrays
    ]
    bound = BoundMask(mask, tuple(np.pad(x, w, mode="edge") for x, w in zip(arrays, widths)))
    positions = np.arange(tokens, dtype=np.int32)
    if not any(set(o.axes) & set("ts") for o in operands):
        # The first and the last position of a block say all about it.
        positions = positions.reshape(blocks, block)[:, [0, -1]].reshape(-1)
        block = 2
    table = classify(
        bound,
        batch_shape=(batch,),
        heads=heads,
        kv_heads=heads,
        q_positions=positions[None],
        kv_positions=positions[None],
        block_q=block,
        block_k=block,
    )
    return np.asarray(table) > 0, ()
