"""Mutants of lists that are tables of blocks, of wide gradients in loops, and of ties in lists."""
# fmt: off

KERNELS = "kernels/test_listed_blocks.py -k 'tpu or turns or transform or nobody or differ or each_list or all_tokens or pairs_round'"

MUTANTS = [
    (
        "_problem/selected.py",
        "masks/test_selected.py -k padding_of",
        [('jnp.pad(x, widths, mode="edge")', "jnp.pad(x, widths)")],
    ),
    (
        "kernels/tpu/_lists.py",
        KERNELS,
        [
            ("x, i * size, size, place.index(axis)", "x, 0, size, place.index(axis)"),
            ("if layout.known is not None or not has_turns(layout):", "if True:"),
            ("[axes[0]] * len(like)", "[(-3, -2)] * len(like)"),
            ("x + y for x, y in zip(sums, found)", "y for x, y in zip(sums, found)"),
            ("if any(x not in a for a in sums)), None)", "if False), None)"),
        ],
    ),
    (
        "kernels/tpu/_traverse.py",
        KERNELS,
        [
            ("(layout.table_axes or ())[:-2] if layout.live_pairs and axis is None else ()", "()"),
            ("w != a or axis not in (None, *a)", "False"),
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
            ("live_pairs=live_pairs(selection, blocking)", "live_pairs=0"),
            ("return always is False and in_place", "return in_place"),
            ("shown(problem, None if listed is True else listed)", "shown(problem, None)"),
            ("if max(live.shape[-2:]) > 1 else None", "if False else None"),
        ],
    ),
    (
        "_sweep/lowering.py",
        KERNELS,
        [("layout.uniform or (layout.live_pairs and not layout.ragged):", "layout.uniform:")],
    ),
    (
        "_problem/listed_blocks.py",
        KERNELS,
        [
            ("word = jnp.where(block >= np.int32(_WORD * i), x, word)", "pass"),
            ("apart = max(blocking.block_q // selection.block_q, 1)", "apart = 1"),
            ("apart *= blocking.group if lists > blocking.kv_heads else 1", "pass"),
            ("live_pairs(selection, blocking) + max(blocking.grid[ROW:])", "live_pairs(selection, blocking)"),
            ("max(min(listed, blocking.columns), 1)", "1"),
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
            ("apart * lowering.copy_pairs + 2 * rows", "0"),
            ("live, selection.block_k // blocking.block_k, 3", "live, 1, 3"),
        ],
    ),
    (
        "_problem/operands.py",
        "masks/test_selected.py -k visited -m ''",
        [('for x in ("valid", "valid_rows", "live")', 'for x in ("valid", "valid_rows")')],
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
    (
        "_sweep/several_columns.py",
        "sweep/test_several_columns.py",
        [
            ("sums = {eqn.outvars[0] for eqn in eqns if _is_product(eqn)} - apart", "sums = {eqn.outvars[0] for eqn in eqns if _is_product(eqn)}"),
            ("* (n if summed else 1)", "* 1"),
            ("(y.sum(0), False) if summed", "(y[0], False) if summed"),
            ("min(_MOST_KEYS, _MOST_LOGITS // rows)", "_MOST_KEYS"),
            ("return listed // -(-listed // most)", "return most"),
        ],
    ),
    (
        "_sweep/loops.py",
        "sweep/test_several_columns.py",
        [
            ("lo = lo + count * self.together", "pass"),
            ("lax.dynamic_slice_in_dim(row, lo + turn * n, n)", "lax.dynamic_slice_in_dim(row, lo + turn, n)"),
            ("if layout.whole and not vectorise:", "if layout.whole or not vectorise and FULL in steps:"),
        ],
    ),
    (
        "_problem/operands.py",
        "sweep/test_several_columns.py",
        [
            ("self.live.shape[-2:] == (1, 1)", "True"),
            ("self.live is not None and self.problem.mask is None and not self.padded", "self.live is not None and self.problem.mask is None"),
        ],
    ),
]
