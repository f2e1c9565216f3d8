"""Mutants of what a CPU visits: blocks by the mask, numbers by the difference, keys of one block."""
# fmt: off

LIVE, DIFFERENCES = "problem/test_live_blocks.py", "kernels/test_differences.py"
SINGLE = "cache/test_cache_memory.py -k single_block"

MUTANTS = [
    (
        "_problem/block_classes.py",
        LIVE,
        [
            ("given = problem.mask is None or not (block_q is None and block_k is None)", "given = problem.mask is None"),
            ("return float(live) * math.prod(blocking.grid) * (_VISIT + math.prod(blocking.block))", "return float(live) * math.prod(blocking.grid) * math.prod(blocking.block)", "smaller blocks are only slower"),
            ("if not all(map(is_known, (*problem.positions(), *arrays))):", "if False:", "a traced table is turned away after it was made"),
            ("while len(found) < 3 and min(found[-1].block) >= 128:", "while False:"),
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
            ("kept = {BATCH: b != 1, HEAD: kv_heads != 1}\n        sizes", "kept = {BATCH: b != 1, HEAD: False}\n        sizes"),
            ("more = blocking.rows * blocking.block_q - blocking.queries + queries", "more = 0"),
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
            ("x if moves(a) or tied else pick(x, a, at) for x, a, tied in both", "x if moves(a) else pick(x, a, at) for x, a, tied in both"),
        ],
    ),
]
