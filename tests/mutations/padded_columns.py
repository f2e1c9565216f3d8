"""Mutants of blocks that do not divide a cache, and of lists that are visited in two parts."""
# fmt: off

BITS = "strategies/test_bitwise.py -k 'default_blocks or bits_of_a_row'"

MUTANTS = [
    (
        "_sweep/loops.py",
        BITS,
        [
            ("if padded and n == len(self.steps) - 1:", "if False:"),
            ("return (column == self.layout.grid[COL] - 1).astype(jnp.int32)", "return jnp.int32(1)"),
        ],
    ),
    (
        "_sweep/padded_columns.py",
        BITS,
        [("size = left if last else self.block", "size = left")],
    ),
    (
        "_sweep/padded_columns.py",
        "cache/test_cache_memory.py -k any_capacity",
        [("if not (layout.padded and lies", "if not (False and lies")],
    ),
    (
        "_sweep/lowering.py",
        BITS,
        [("return BlockSizes(queries, 128 if", "return BlockSizes(queries, request.keys // 2 if")],
    ),
    (
        "_problem/in_place.py",
        "cache/test_cache_memory.py -k any_capacity",
        [("early = [one == (1,) and not shared for one in single]", "early = [False for one in single]")],
    ),
    (
        "_problem/selected.py",
        "masks/test_selected.py -k one_list_for_all",
        [("if x.shape[axis] == 1 and parts > 1:", "if x.shape[axis] == 1:")],
    ),
    (
        "strategies/_fold.py",
        "conformance/test_narrow_sums.py -k two_visits",
        [("            problem = read_twice(problem, lowering, in_place)", "            pass")],
    ),
]
