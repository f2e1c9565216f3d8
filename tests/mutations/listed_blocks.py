"""Mutants of lists that are tables of blocks, of wide gradients in loops, and of ties in lists."""
# fmt: off

MUTANTS = [
    (
        "_problem/listed_blocks.py",
        "masks/test_selected.py -k 'visited or gathered'",
        [
            ("jnp.where(indices < 0, count, indices)", "indices"),
            ("selection.block_q // blocking.block_q, 1)", "0, 1)"),
            ("each == 1 else jnp.repeat(live, selection.block_q, 5)", "True else live"),
            ("(group if lists > kv_heads else 1)", "1"),
            ("apart * _COPY + 2 * rows", "0"),
            ("selection.block_k // blocking.block_k", "1"),
        ],
    ),
    (
        "_problem/operands.py",
        "masks/test_selected.py -k visited -m ''",
        [('for role in ("valid", "live") if role in named', 'for role in ("valid",) if role in named')],
    ),
    (
        "_problem/block_classes.py",
        "masks/test_selected.py -k visited",
        [
            ("most if table is None else jnp.minimum(table, most)", "most"),
            ("live.all((-2, -1))", "live.any((-2, -1))"),
            ("live.any((-2, -1))", "live.all((-2, -1))"),
        ],
    ),
    (
        "_jax.py",
        "masks/test_selected.py -k narrow",
        [("shadow_of(x) if shadow is None else shadow", "shadow_of(x)")],
    ),
    (
        "_sweep/top.py",
        "test_top_keys.py -k 'equal or tree'",
        [
            ("(least == -jnp.inf) | (", "jnp.bool_(True) | ("),
            ("return list(accs if ordered else greatest(values, places, count))", "return list(accs)"),
        ],
    ),
    (
        "_problem/fold.py",
        "test_top_keys.py -k tree",
        [("_visited(*given, places=True)", "_visited(*given)")],
    ),
]
