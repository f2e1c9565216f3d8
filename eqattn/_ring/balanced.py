"""`Balanced`, the layout of a ring that shares out the work of the masks at hand."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._misc import as_size
from .._problem.problem import as_mask
from ..masks._base import leaf_terms
from .layout import AbstractRingLayout
from .plan import counted_blocks


_MOST_BLOCKS = 1024  # of a side of the table that is counted, for tens of milliseconds at most
_GOAL = 1.01  # the balance at which chunks are no longer exchanged, chosen by trial
_LEAST_CHUNKS = 8  # of a device, if none is given: with 4, long documents stay uneven
_LARGEST_CHUNK = 512  # tokens, if none is given: several blocks of every lowering
_LEAST_CHUNK = 64  # tokens, if none is given and larger ones are not balanced: a block of a kernel
_UNEVEN = 1.03  # where smaller chunks are tried: what is counted by blocks is 2% off, by pairs


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Balanced(AbstractRingLayout):
    """Each device holds as many chunks as the others, with as much work under the masks at hand.

    The work of a chunk is the number of blocks that its queries see, segment ids included. So
    packed documents, windows and masks of your own are balanced as causal ones are. With several
    masks, as those of full and of windowed layers, every one of them is balanced.

    It is made on the host, of NumPy arrays, in milliseconds. There are two ways to use it:

    - For a mask that stays the same, as the `layout` of a [`eqattn.Ring`][].
    - For ids that are others in each batch, in the data loader. `permute` all that has tokens, and
        pass `positions(tokens, n).reshape(-1)` to the program as `q_positions` and `kv_positions`
        of a ring without a layout. Nothing is compiled again. Give the metadata `blocksize_q` and
        `blocksize_k` that divide the chunk, as blocks across chunks cannot be skipped. Give the
        `chunk`, too, as that of one batch may else not be that of the next.

    **Arguments:**

    - `masks`: a mask as for [`eqattn.attention`][], or a list of them. Their arrays must be known.
    - `tokens`: the length of the sequence.
    - `n`: the number of devices.
    - `chunk`: the number of tokens that stay together. Smaller chunks balance better, and larger
        ones have larger blocks. The default is the largest size up to 512 of which each device has
        at least 8 chunks. If that is less than 64, it is the largest up to 64.
    - `batch`, `heads`: the sizes that arrays of the masks may have. The work of a chunk is summed
        over them.

    **Raises:** `ValueError` for sizes that do not divide, and for a mask whose arrays are traced or
        which lists keys.
    """

    held: tuple[tuple[int, ...], ...]

    def __init__(
        self,
        masks: Any,
        tokens: int,
        n: int,
        *,
        chunk: int | None = None,
        batch: int = 1,
        heads: int = 1,
    ):
        tokens, n = as_size(tokens, "tokens", 1), as_size(n, "n", 1)
        batch, heads = as_size(batch, "batch", 1), as_size(heads, "heads", 1)
        if tokens % n:
            raise ValueError(f"{tokens} tokens are not equal pieces for n={n} devices; pad them.")
        own = tokens // n
        sizes = _chunks(own) if chunk is None else [as_size(chunk, "chunk", 1)]
        if own % sizes[0]:
            raise ValueError(
                f"chunk={chunk} does not divide the {own} tokens of each of {n} devices; choose a "
                "divisor, or pad the tokens."
            )
        several = isinstance(masks, Sequence) and not isinstance(masks, str)
        each = [as_mask(mask) for mask in (masks if several else [masks])]
        top = sizes[0]
        fine = [b for b in range(1, top) if top % b == 0 and tokens // b <= _MOST_BLOCKS]
        block = fine[0] if fine else top
        rows = []
        for mask in each:
            if lists := [type(x).__name__ for x in leaf_terms(mask) if x.selects]:
                raise ValueError(
                    f"masks: {', '.join(lists)} lists as many keys for each query, which any "
                    "layout balances; leave it out."
                )
            live, unknown = counted_blocks(mask, tokens, block, batch, heads)
            if unknown:
                raise ValueError(
                    f"masks: the arrays of {', '.join(unknown)} are traced; make the layout on the "
                    "host, from NumPy arrays, and pass its positions to the program."
                )
            rows.append(live.sum((0, 1, 3), dtype=np.int64))
        # One device may hold chunks that all have as much work as there can be, such as full
        # windows, where too few chunks have less. Then only smaller chunks can be balanced better.
        least, owner = np.inf, np.zeros(0, int)
        for size in (x for x in sizes if x % block == 0):
            work = np.asarray(rows, np.float64).reshape(len(rows), -1, size // block).sum(-1)
            found = share_out(work, n)
            if (most := _greatest_load(work, found, n)) < least:
                least, owner = most, found
            if least <= _UNEVEN:
                break
        held = [tuple(int(c) for c in np.flatnonzero(owner == device)) for device in range(n)]
        object.__setattr__(self, "held", tuple(held))

    @property
    def parts(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return len(self.held[0])

    def chunks(self, n: int) -> np.ndarray:
        if n != len(self.held):
            raise ValueError(
                f"This layout was made for {len(self.held)} devices, and there are {n}; make one "
                f"with n={n}."
            )
        return np.asarray(self.held)

    def __repr__(self) -> str:
        return f"Balanced({self.parts} chunks for each of {len(self.held)} devices)"


def _chunks(own: int) -> list[int]:
    """The numbers of tokens of a chunk that are tried by default, for `own` tokens of a device."""
    most = min(_LARGEST_CHUNK, max(own // _LEAST_CHUNKS, min(_LEAST_CHUNK, own)))
    sizes = [next(size for size in range(most, 0, -1) if own % size == 0)]
    while sizes[-1] % 2 == 0 and sizes[-1] > _LEAST_CHUNK:
        sizes.append(sizes[-1] // 2)
    return sizes


def _greatest_load(work: np.ndarray, owner: np.ndarray, n: int) -> float:
    """The work of the busiest device over the mean, of the kind for which that is greatest."""
    loads = np.stack([np.bincount(owner, each, n) for each in work])
    mean = loads.mean(1)
    return float((loads.max(1) / np.where(mean == 0, 1, mean)).max())


def share_out(work: np.ndarray, n: int) -> np.ndarray:
    """Shares out chunks among `n` devices, as many to each.

    The largest chunk that is left goes to the device with the least work so far. Then chunks of the
    busiest device are exchanged while that helps. With several kinds of work, the load of a device
    is its greatest, each kind relative to its mean.

    **Arguments:**

    - `work`: the work of each chunk, of one or more kinds, `[kinds, chunks]`.

    **Returns:** the device of each chunk, int `[chunks]`.
    """
    kinds, chunks = work.shape
    total = work.sum(1, keepdims=True)
    work = work / np.where(total == 0, 1, total) * n
    load, room, owner = np.zeros((kinds, n)), np.full(n, chunks // n), np.empty(chunks, int)
    for c in np.argsort(-work.max(0), kind="stable"):
        after = np.where(room == 0, np.inf, (load + work[:, c, None]).max(0))
        owner[c] = device = after.argmin()
        load[:, device] += work[:, c]
        room[device] -= 1
    for _ in range(chunks):  # far more than are ever of use
        busiest = load.max(0).argmax()
        if load[:, busiest].max() <= _GOAL:
            break
        mine, others = np.flatnonzero(owner == busiest), np.flatnonzero(owner != busiest)
        more = work[:, None, others] - work[:, mine, None]  # for the busiest, by each exchange
        here = (load[:, busiest, None, None] + more).max(0)
        there = (load[:, None, owner[others]] - more).max(0)
        worst = np.maximum(here, there)
        i, j = np.unravel_index(worst.argmin(), worst.shape)
        if not worst[i, j] < load[:, busiest].max():
            break
        a, b = mine[i], others[j]
        load[:, busiest] += work[:, b] - work[:, a]
        load[:, owner[b]] += work[:, a] - work[:, b]
        owner[a], owner[b] = owner[b], owner[a]
    return owner
