"""Mutants of orders of tokens, of what is empty, and of packed rows whose bits are fixed."""
# fmt: off

BALANCED = "ring/test_against_oracle.py ring/test_balanced.py -k 'feature_in_a_balanced or bad_input'"
PACKED = "test_ragged_attention.py -k 'bits or no_queries or cascades or ring_buffer'"

MUTANTS = [
    (
        "_ring/layout.py",
        BALANCED,
        [
            ("if self.parts == 1 and self.in_order(n):", "if self.parts == 1:"),
            ("(self.chunks(n).reshape(-1) == np.arange(n * self.parts)).all()", "self.parts == 1"),
        ],
    ),
    (
        "strategies/_sharded.py",
        BALANCED,
        [
            ("    if not layout.in_order(1):", "    if False:"),
        ],
    ),
    (
        "_calls/_packing.py",
        PACKED,
        [("if not len(packed):", "if False:")],
    ),
    (
        "_calls/cascade.py",
        PACKED,
        [("    if getattr(strategy, \"fixed\", False):", "    if False:")],
    ),
    (
        "_problem/row_pages.py",
        PACKED,
        [
            ("parts = -(-own // size)", "size = min(size, own)\n    parts = -(-own // size)"),
            ("max(min(even_block(own) or 128, own), 1)", "min(even_block(own) or 128, own)"),
            ("return at if len(at) == 1 else at[row]", "return at if len(at) == 1 else at[row * 0]"),
        ],
    ),
    (
        "_problem/row_pages.py",
        "cache/test_packed_key_shards.py",
        [
            ("return s * self.devices if self.inside else s", "return s"),
            ("pool = pieces.swapaxes(0, 1) if pieces.shape[1] > 1 else pieces", "pool = pieces"),
            ("device * (b * parts) + part", "device * parts + part"),
            ("at = lax.all_gather(at, sharers.axis, axis=1, tiled=True)", "pass"),
            ("at = at.swapaxes(1, 2)", "at = at"),
            ("at = whole.pieces(at, -REACH, pages.page_size)", "at = whole.pieces(at, 0, pages.page_size)"),
        ],
    ),
    (
        "_calls/ragged.py",
        "cache/test_packed_key_shards.py -k raises",
        [
            ("lengths = raise_if(lengths, lengths > most, message)", "pass"),
        ],
    ),
    (
        "masks/_terms.py",
        "cache/test_cache.py -k forgets",
        [
            ("if term.needs_positions and sizes[-1] is None:", "if False:"),
        ],
    ),
    (
        "_problem/operands.py",
        "strategies/test_bitwise.py -k one_query",
        [
            ("(len(q), blocking.rows * blocking.block_q)", "(len(q), q.shape[1])", "positions are repeated to whole blocks before they get here, those of a single query too"),
        ],
    ),
    (
        "_problem/selected.py",
        "masks/test_selected.py -k no_queries",
        [
            ("places is None or s == 0", "places is None"),
        ],
    ),
]
