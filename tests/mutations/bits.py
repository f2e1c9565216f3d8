"""Mutants of what fixes the bits of a row."""
# fmt: off

BITS = "strategies/test_bitwise.py -k 'bits_of_a_row or any_number'"

MUTANTS = [
    (
        "_problem/blocking.py",
        "strategies/test_bitwise.py -k 'gradients_of_a_step or bits_of_scores'",
        [('if not self.fixed or self.queries != 1 or "t" not in axes:', "if True:")],
    ),
    (
        "_sweep/tokens.py",
        "sweep/test_tokens.py",
        [("whole = jnp.pad(lax.stop_gradient(x), widths", "whole = jnp.pad(x, widths")],
    ),
    (
        "_sweep/fold.py",
        "strategies/test_bitwise.py -k no_zero",
        [("num = unsigned_zeros(num)", "pass")],
    ),
    (
        "_sweep/loops.py",
        "strategies/test_bitwise.py -m slow -k 'many_rows and positions'",
        [("_, blocks = lax.optimization_barrier((jnp.int32(t), blocks))", "pass")],
    ),
    (
        "strategies/_fold_strategy.py",
        "strategies/test_bitwise.py -k whole_vectors",
        [("return queries if queries == 1 else -(-queries // 8) * 8, keys or 128", "return queries, keys or 128")],
    ),
    (
        "_problem/block_classes.py",
        BITS,
        [("return xp.minimum(table, np.int8(PARTIAL))", "return table")],
    ),
    (
        "_problem/operands.py",
        BITS,
        [
            ("table = as_partial(table) if blocking.fixed else table", "pass"),
        ],
    ),
    (
        "_problem/block_classes.py",
        BITS,
        [
            ("placed = (None, None) if table is None else on_grid(as_partial(table))", "placed = (None, None) if table is None else on_grid(table)"),
        ],
    ),
    (
        "strategies/_fold_strategy.py",
        "strategies/test_bitwise.py",
        [
            ("if self.fixed and platform is Platform.AUTO:", "if False:", "on a CPU there is no kernel to choose"),
            ("if self.fixed and device not in self.fixed_in:", "if False:"),
        ],
    ),
    (
        "strategies/_on_device.py",
        "strategies/test_bitwise.py",
        [
            ("by_hand=self.fixed),\n            fixed=self.fixed,\n", "by_hand=self.fixed),\n"),
            ("manual=manual,\n            fixed=self.fixed,", "manual=manual,\n            fixed=False,"),
            ("lowering, by_hand=self.fixed", "lowering, by_hand=False"),
        ],
    ),
    (
        "strategies/_on_device.py",
        "strategies/test_many_queries.py",
        [
            ("        if self.fixed:\n            return self.reads_stored\n", ""),
            ("if not arrays or not isinstance(t, int)", "if not isinstance(t, int)"),
            ("at_most(s, t * (heads // kv_heads))", "at_most(s, t)"),
            ("at_most(s, t * (heads // kv_heads))", "at_most(s, 1 + t * (heads // kv_heads))"),
            ("return bool(lowering.unsupported_vectors(problem.query, problem.value))", "return False"),
        ],
    ),
    (
        "_problem/stack_layer.py",
        "cache/test_stack_layer.py -k pages_of",
        [("128 if s % 128 == 0 else 256", "256")],
    ),
    (
        "_ring/counts.py",
        "ring/test_balanced.py -k did_not",
        [("if mask.selects or any(", "if any(")],
    ),
    (
        "_misc/run_time.py",
        "cache/test_full_caches.py cache/test_cache_contents.py",
        [
            ("on_each = jax.shard_map(fn, mesh=mesh", "on_each = fn if mesh else jax.shard_map(fn, mesh=mesh"),
            ("wrong.any(dim)", "wrong.all(dim)"),
            ("jnp.any(wrong)", "jnp.all(wrong)"),
        ],
    ),
    (
        "strategies/_support.py",
        "strategies/test_bitwise.py -k promises",
        [
            ("name in asked and name not in promised", "name not in promised"),
            ('{*BITS} - {"devices"}', "set(BITS)"),
            ('if promised and features.get("dropout") and "batch" in asked:', "if False:"),
            ('features.get("dropout") and "batch" in asked', 'features.get("dropout")'),
        ],
    ),
    (
        "strategies/_sharded.py",
        "strategies/test_bitwise.py",
        [("(1 if place.mesh is None else place.devices)", "1")],
    ),
]
