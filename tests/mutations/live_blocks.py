"""Mutants of what a CPU visits (blocks by the mask, numbers by the difference, keys of one block), and of
exports in which each row has something of its own.
"""
# fmt: off

LIVE, DIFFERENCES = "problem/test_live_blocks.py", "kernels/test_differences.py"
SINGLE = "cache/test_cache_memory.py -k single_block"

FEW = "masks/test_selected.py -k few_keys"

MUTANTS = [
    (
        "_problem/block_classes.py",
        FEW,
        [
            ("if arrays or not 0 < 8 * rows <= s:", "if not 0 < 8 * rows <= s:"),
            ("rows * float(np.mean(table != EMPTY)) <= FEW", "False"),
        ],
    ),
    (
        "strategies/_fold.py",
        FEW,
        [("in_place = in_place or (wide and sees_few_keys(rest))", "in_place = in_place")],
    ),
    (
        "_problem/selected.py",
        "masks/test_selected.py -k 'copied_whole or memory_is'",
        [
            ("x, at = lax.optimization_barrier((x, at))", "pass"),
            ("of_batch = () if x.table is not None else (0,)", "of_batch = ()"),
            ("return of_batch if flat else (*of_batch, 2)", "return of_batch"),
        ],
    ),
    (
        "_problem/in_place.py",
        "cache/test_cache_memory.py -k no_step_copies_the_cache",
        [("if lead and len(x.arrays) and x.shape[0] == 1 and lowering.drops_single_axes:", "if False:")],
    ),
    (
        "strategies/_explicit_axes.py",
        "kernels/test_tpu_meshes.py -k 'mixed or found'",
        [("if kinds.get(n) == AxisType.Auto]", "if False]")],
    ),
    (
        "_closure/closure.py",
        "test_closure.py -k between_eager",
        [
            ("if len(within) > 4 or id(x) in within", "if True or id(x) in within"),
            ("space = {**old.__globals__, **dict(zip(shared, xs[o:]))} if shared else old.__globals__", "space = old.__globals__"),
        ],
    ),
    (
        "_jax.py",
        "ring/test_layouts_and_plans.py -k explicit_axis",
        [("return without_explicit_axes(move, (x,), x, spec)", "return move(x)")],
    ),
    (
        "_problem/mesh.py",
        "conformance/test_export.py -k several_devices",
        [("if mesh.size > 1 and not all(", "if False and not all(")],
    ),
    (
        "_problem/block_classes.py",
        LIVE,
        [
            ("if block_q is not None or block_k is not None or chosen.in_place", "if chosen.in_place"),
            ("return live * (_VISIT + math.prod(blocking.block))", "return live * math.prod(blocking.block)", "smaller blocks are only slower"),
            ("if jax.tree.leaves((problem.mask, *_given_positions(problem))):", "if False:"),
            ("while len(found) < 3 and min(found[-1].block) >= 128:", "while False:"),
        ],
    ),
    (
        "_problem/block_classes.py",
        "kernels/test_tpu_long.py -k 'blocks or lengths'",
        [
            ("if now > _MORE * before:", "if False:"),
            ("return larger if kinds == {CORNER} else chosen", "return larger"),
            ("if sizes is None or jax.tree.leaves((problem.mask, *_given_positions(problem))):", "if sizes is None:"),
        ],
    ),
    (
        "kernels/tpu/__init__.py",
        "kernels/test_tpu_long.py -k 'blocks or lengths'",
        [
            ("plain &= not problem.scores and problem.seed is problem.sinks is None", "plain &= True"),
            ("and min(t, s) >= LARGE and", "and"),
        ],
    ),
    (
        "_problem/fold.py",
        f"{DIFFERENCES} -k logarithms",
        [("    if lowering is not XLA:\n        problem = looked_up(problem)", "    if lowering is XLA:\n        return problem, problem\n    problem = looked_up(problem)")],
    ),
    (
        "_problem/differences.py",
        f"{DIFFERENCES} -k matrix",
        [
            ("return Diagonals(role, whole, axes, first=blocking.keys + least - keys)", "return Diagonals(role, whole, axes, first=blocking.keys + least - keys + 1)"),
            ("kept = [(a, n) for a, n in ((BATCH, b), (HEAD, kv_heads)) if n != 1]", "kept = [(a, n) for a, n in ((BATCH, b), (HEAD, 1)) if n != 1]"),
            ("more = blocking.rows * blocking.block_q - blocking.queries + queries", "more = 0"),
        ],
    ),
    (
        "_problem/differences.py",
        f"{DIFFERENCES} -k 'padding or hidden'",
        [
            ("last = jnp.clip(np.int32(blocking.queries - 1) - row.reshape(()), 0, queries - 1)", "last = queries - 1"),
            ("whole = jnp.pad(self.array, ((0, 0), (0, 0), (-least, more)), mode=\"edge\")", "whole = jnp.pad(self.array, ((0, 0), (0, 0), (-least, more)))"),
        ],
    ),
    (
        "_problem/problem.py",
        f"{DIFFERENCES} -k ones_own",
        [
            ("    while isinstance(part, AbstractWrapper):\n        part = part.score\n", ""),
        ],
    ),
    (
        "_problem/operands.py",
        f"{DIFFERENCES} -k name_of_an",
        [
            ('role = f"of {type(part).__name__}"', "role = type(part).__name__"),
        ],
    ),
    (
        "_calls/_packing.py",
        "test_ragged_attention.py -k not_padded",
        [
            ("most = max((n + rows * (size - 1)) // size, 1)", "most = n // size + rows"),
        ],
    ),
    (
        "_calls/ragged.py",
        "test_ragged_attention.py -k not_padded",
        [
            ("most = (1 if len(query) <= len(lengths) else 16) if block_q is None else block_q", "most = 16 if block_q is None else block_q"),
        ],
    ),
    (
        "_sweep/lowering.py",
        f"{DIFFERENCES} -k logarithms",
        [('return jax.default_backend() == "cpu"\n\n    def multiplies', "return False\n\n    def multiplies")],
    ),
    (
        "_sweep/loops.py",
        SINGLE,
        [
            ("looped = () if layout.uniform or layout.pages else (*batch, ROW, COL)", "looped = () if layout.uniform or layout.pages or layout.ragged else (*batch, ROW, COL)"),
            ("here = [jnp.int32(x) for x in (t, *at.values())]", "here = [jnp.int32(t)]"),
            ("x if moves(a) or tied else _pick(x, a, at) for x, a, tied in both", "x if moves(a) else _pick(x, a, at) for x, a, tied in both"),
        ],
    ),
    (
        "masks/_tree.py",
        "conformance/test_export.py -k row_has",
        [
            ("        return jax.vmap(lambda parents: _preorder(jnp, parents))(parents)", "        pass"),
            ("        return jax.vmap(lambda *walk: _depths(jnp, *walk))(enter, leave)", "        pass"),
        ],
    ),
    (
        "masks/_intervals/structural.py",
        "conformance/test_export.py -k row_has",
        [("grid = jnp.broadcast_shapes(table.lo.shape[:GRID], index.lo.shape[:GRID])", "grid = np.broadcast_shapes(table.lo.shape[:GRID], index.lo.shape[:GRID])")],
    ),
]
