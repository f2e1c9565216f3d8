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
        "_ragged_attention.py",
        PACKED,
        [
            ("parts = -(-s // size)", "size = min(size, s)\n    parts = -(-s // size)"),
            ("max(min(even_block(s) or 128, s), 1)", "min(even_block(s) or 128, s)"),
            ("jnp.broadcast_to(at, key_.shape[:2])[row]", "jnp.broadcast_to(at, key_.shape[:2])[row * 0]"),
            ("if not len(packed):", "if False:"),
            ("    if getattr(strategy, \"fixed\", False):", "    if False:"),
        ],
    ),
    (
        "_problem/operands.py",
        "strategies/test_bitwise.py -k one_query",
        [
            ("max(q.shape[1], blocking.block_q)", "q.shape[1]"),
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
