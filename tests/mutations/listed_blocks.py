"""Mutants of lists that are tables of blocks, of wide gradients in loops, and of ties in lists."""
# fmt: off

KERNELS = "kernels/test_listed_blocks.py -k 'tpu or turns or transform or nobody'"

MUTANTS = [
    (
        "kernels/tpu/_lists.py",
        KERNELS,
        [
            ("x, i, 1, place.index(axis)", "x, 0, 1, place.index(axis)"),
            ("if layout.known is not None or layout.ragged or", "if layout.known is not None or True or"),
            ("[axes[0]] * len(found)", "[(-3, -2)] * len(found)"),
        ],
    ),
    (
        "kernels/tpu/_traverse.py",
        KERNELS,
        [
            ("(layout.table_axes or ())[:-2] if layout.live_pairs else", "() if layout.live_pairs else"),
            ("() if axis is None else (axis,)", "()"),
        ],
    ),
    (
        "kernels/tpu/_work_list.py",
        KERNELS,
        [
            ("not (ROW in kept and COL in kept):", "True:"),
            ("layout.live_pairs + max(layout.grid[ROW:])", "layout.live_pairs"),
        ],
    ),
    (
        "kernels/tpu/_forward_step.py",
        KERNELS,
        [("self.layout.live_pairs > 0 or", "False or")],
    ),
    (
        "strategies/_fold.py",
        KERNELS,
        [
            ("0 if lowering is XLA else live_pairs(selection, blocking)", "0"),
            ("return always is False and in_place", "return in_place"),
            ("mask=None if listed is True else listed)\n    spread", "mask=None)\n    spread"),
        ],
    ),
    (
        "_sweep/lowering.py",
        KERNELS,
        [("layout.uniform or layout.live_pairs:", "layout.uniform:")],
    ),
    (
        "_problem/listed_blocks.py",
        KERNELS,
        [
            ("if apart > 1:", "if False:"),
            ("live_pairs(selection, blocking) + max(blocking.grid[ROW:])", "live_pairs(selection, blocking)"),
            ("listed, blocking.columns), 1)", "1, blocking.columns), 1)"),
        ],
    ),
    (
        "_problem/listed_blocks.py",
        "masks/test_selected.py -k 'visited or gathered'",
        [
            ("jnp.where(indices < 0, count, indices)", "indices"),
            ("selection.block_q // blocking.block_q, 1)", "0, 1)"),
            ("each == 1 else jnp.repeat(live, selection.block_q, 5)", "True else live"),
            ("(group if lists > kv_heads else 1)", "1"),
            ("apart * _COPY + 2 * rows", "0"),
            ("live, selection.block_k // blocking.block_k, 3", "live, 1, 3"),
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
            ("live.all((-2, -1)), table,", "live.all((-2, -1)), np.int8(FULL),"),
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
