"""The sizes of blocks, and what the best of them depend on."""

from typing import Any, NamedTuple


class BlockRequest(NamedTuple):
    """The properties of a call that its best block sizes depend on.

    **Arguments:**

    - `queries`, `keys`: the numbers of query and key tokens.
    - `group`: the number of query heads that a block has for each of its queries.
    - `dtype`, `head_dim`: the dtype and the head dim of the queries.
    - `in_place`: whether keys and values are read where they lie in memory.
    - `page_size`: the tokens of a page if keys lie in pages, else 0.
    - `itemsize`, `token_nbytes`: the bytes of a number, and of all keys and values of a token on
        one device, as they are stored.
    - `together`: the number of batch elements times that of key heads.
    - `fixed`: whether results may not depend on the number of keys, nor on their pages.
    - `reads_pairs`: whether a number for each pair of tokens is read, which may lie in place.
    """

    queries: int
    keys: int
    group: int
    dtype: Any
    head_dim: int
    in_place: bool
    page_size: int = 0
    itemsize: int = 4
    token_nbytes: int = 0
    together: Any = 1
    fixed: bool = False
    reads_pairs: bool = False


class BlockSizes(NamedTuple):
    """The tokens of the blocks that are fastest for a lowering. Pages in a block are whole."""

    queries: int
    keys: int


def even_size(tokens: Any, most: int) -> int:
    """The size of blocks that are as few as possible, a multiple of 8 up to about `most` tokens.

    Blocks of `most` tokens and a padded rest took longer, in float32 without a mask. On an Intel
    Xeon, gradients of 160 tokens took 2.2 times as long, and those of 300 tokens 2.3 times.
    """
    if not isinstance(tokens, int) or tokens <= most:
        return most
    size = -(-tokens // -(-tokens // most))
    return min(-(-size // 8) * 8, most)


def whole_size(tokens: Any, most: int) -> int:
    """The size of the largest blocks, up to `most` tokens, that divide them all and are not small
    for that. Otherwise it is that of even blocks, the last of which is padded.
    """
    if isinstance(tokens, int) and tokens > most:
        divisors = (n for n in range(most, most // 3, -1) if tokens % n == 0)
        return next(divisors, even_size(tokens, most))
    return even_size(tokens, most)
