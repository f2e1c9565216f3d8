"""Mutants of rows that pad a block, of short sequences on a CPU, and of what was found beside
them.
"""
# fmt: off

ROWS = "problem/test_padded_rows.py"
EXPLICIT = "cache/test_explicit_meshes.py -k 'shared_page or reordered_and'"

MUTANTS = [
    (
        "_problem/operands.py",
        ROWS,
        [
            ("self.hides_rows = padded != whole.queries and", "self.hides_rows = False and"),
            ('for x in ("valid", "valid_rows", "live")', 'for x in ("valid", "live")'),
            ('table = jnp.where(valid.all(-1), table, jnp.minimum(table, jnp.int8(PARTIAL)))', 'pass'),
        ],
    ),
    (
        "_problem/operands.py",
        "kernels/test_tpu_meshes.py -k single",
        [
            ("(len(q), blocking.rows * blocking.block_q)", "(len(q), max(q.shape[1], blocking.block_q))", "the classes of one block are broadcast to all rows"),
            ('(len(k), at["valid"].shape[3])) if self.padded else k', "k.shape)"),
        ],
    ),
    (
        "_problem/operands.py",
        "conformance/test_corners.py strategies/test_laws.py scores/test_scores.py",
        [
            ("seen = problem.mask is None and live is None and not problem.scores", "seen = live is None and not problem.scores"),
            ("seen = problem.mask is None and live is None and not problem.scores", "seen = problem.mask is None and live is None"),
            ("seen = seen and blocking.columns * blocking.block_k == blocking.keys", "pass"),
        ],
    ),
    (
        "_problem/block_classes.py",
        ROWS,
        [
            ("if padded is not None and table is not None and not", "if False and not"),
            ("plain and blocking.parts == 1 and 2 * last", "blocking.parts == 1 and 2 * last"),
            ("2 * last >= blocking.block_q", "2 * last >= 0"),
            ("return reads_pairs(operands) or any(type(x) is not BlockOperand for x in operands)", "return reads_pairs(operands)"),
            ("return reads_pairs(operands) or any(", "return any("),
        ],
    ),
    (
        "_problem/block_classes.py",
        ROWS,
        [
            ("if hides_rows and blocking.queries % STEP:", "if False:"),
            ("(not hides_rows and each == -1)", "(each == -1)"),
        ],
    ),
    (
        "_sweep/fold.py",
        "sweep/test_turned.py",
        [
            ("layout.turned and not (vectorise and layout.differentiated)", "layout.turned and not vectorise"),
            ("layout.turned and not (vectorise and layout.differentiated)", "layout.turned"),
        ],
    ),
    (
        "_problem/lookups.py",
        "kernels/test_lookups.py",
        [
            ("if reads and eqn.primitive in _SINGULAR and not active.isdisjoint(eqn.outvars):", "if False:"),
            ("if reads and eqn.primitive in _SINGULAR and not active.isdisjoint(eqn.outvars):", "if reads and eqn.primitive in _SINGULAR:"),
            ("lax.convert_element_type_p, lax.add_p, lax.sub_p}", "lax.convert_element_type_p}"),
        ],
    ),
    (
        "cache/_page_table.py",
        EXPLICIT,
        [
            ("return sharded_alike(over, pools, old, new)", "return over(pools, old, new)"),
            ("return sharded_alike(pick, (table, length), rows, rows_stay=len(rows) == len(length))", "return pick((table, length), rows)"),
        ],
    ),
    (
        "_jax.py",
        EXPLICIT,
        [("typed = next((a for a in (x, indices) if explicit_axes(a)), None)", "typed = None")],
    ),
    (
        "masks/_repr.py",
        "masks/test_text.py -k limit",
        [("_CELLS) * _CELLS), _LONGEST)", "_CELLS) * _CELLS), 2**40)")],
    ),
    (
        "viz/_weights.py",
        "viz/test_viz.py -k labels",
        [("parse_math=False", "parse_math=True")],
    ),
    (
        "nn/_dropout.py",
        "nn/test_multihead.py -k numpy_flags",
        [
            ("isinstance(inference, bool | np.bool_)", "isinstance(inference, bool)"),
            ("if settings and isinstance(p, int | np.integer):", "if False:"),
        ],
    ),
]
