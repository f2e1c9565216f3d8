"""Mutants of lists of keys."""
# fmt: off

LISTS = "masks/test_selected.py -k 'stands or pages or dropout or errors'"

MUTANTS = [
    (
        "masks/_selected.py",
        LISTS,
        [
            ("return rows, (rows != none) & ~again", "return rows, rows != none"),
            ("return rows, (rows != none) & ~again", "return rows, ~again", "an entry without a key counts as one beyond all places and positions, where no key is found"),
            ("jnp.asarray(k) // np.int32(self.block_k)", "jnp.asarray(k)"),
            ("known.max() >= blocks", "known.max() > blocks"),
            ("jnp.repeat(self.indices, heads // h, -3)", "jnp.tile(self.indices, (heads // h, 1, 1))"),
        ],
    ),
    (
        "masks/_terms.py",
        LISTS,
        [
            ("neutral = isinstance(mask, And)", "neutral = True"),
            ("lambda x, to=to: to if", "lambda x: True if"),
            ("if _negates_list(mask):", "if isinstance(mask, Not):"),
        ],
    ),
    (
        "_problem/selected.py",
        LISTS,
        [
            ("seen = seen & (rows < s)", "pass"),
            ("np.arange(lists, dtype=np.int32) // np.int32(lists // kv_heads)", "np.zeros(lists, np.int32)"),
            ("h_indices=merged(h_indices.reshape(-1, lists, 1, mine))", "h_indices=None"),
            ("b_indices=merged(b_indices.reshape(-1, 1, 1))", "b_indices=None"),
            ("x = jnp.moveaxis(x, 1, 3)", "pass"),
            ("kv_positions = jnp.asarray(given)[_owner(given.shape[0]), rows.slots]", "pass"),
            ("slots // page], slots % page", "slots // page], slots * 0"),
        ],
    ),
    (
        "strategies/_fold.py",
        LISTS,
        [
            ("more = ~always if listed is True else listed & ~always", "more = None if listed is True else listed"),
        ],
    ),
    (
        "_problem/selected.py",
        "masks/test_selected_positions.py",
        [
            ("return slots, seen & found", "return slots, seen"),
        ],
    ),
]
