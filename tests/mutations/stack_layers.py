"""Mutants of what reads one layer of a stack, and of files that a class has outlived."""
# fmt: off

LAYER, SHARES, MESHES = "cache/test_stack_layer.py", "cache/test_key_shares.py", "cache/test_automatic_meshes.py -k reading"

MUTANTS = [
    (
        "_problem/stack_layer.py",
        LAYER,
        [
            ("self.index * each.size + each", "0 * self.index + each"),
            ("self.decode(*[x[self.index] for x in self.arrays])", "self.decode(*[x[0] for x in self.arrays])"),
            ("return self.stored.itemsize", "return 4"),
            ("return x.pages() if isinstance(x, StackLayer) else x", "return x"),
        ],
    ),
    (
        "_problem/in_place.py",
        LAYER,
        [
            ('BlockOperand("page", x.index, ())', 'BlockOperand("page", 0 * x.index, ())'),
            ("sizes += (len(x.arrays[0]),)\n            # The", "sizes += (1,)\n            # The"),
            ("(len(tables), *axes), 1, jax.vmap", "(0, *axes), 1, jax.vmap"),
            ("[lead + 2] * e", "[2] * e"),
        ],
    ),
    (
        "_problem/in_place.py",
        "cache/test_automatic_meshes.py -k eight_bits",
        [
            ("return x if as_they_are else x.in_shares(blocking.kv_heads)", "return x.in_shares(blocking.kv_heads)"),
            ("a.shape[-2] == blocking.kv_heads for a in", "True for a in"),
        ],
    ),
    (
        "_save/describe.py",
        "save/test_save.py",
        [
            ("named = x.name in type(x).__members__", "named = True"),
            ("if isinstance(x, plain) and type(x) not in (bool, int, str, float) and not numpy:", "if False:"),
            ('if "class" in body:', "if False:"),
            ("return body[\"class\"] == _path(cls)", "return True"),
            ("return cls[member] if isinstance(member, str) else cls(member)", "return cls[member]"),
            ("(not found or AttentionRegistry.get(body[\"name\"]) is cls)", "True"),
        ],
    ),
    (
        "_save/save.py",
        "save/test_save_files.py",
        [('start = "" if isinstance(file, io.TextIOBase) else file.read', "start = file.read")],
    ),
    (
        "kernels/tpu/_grid.py",
        LAYER,
        [
            ("[x.reshape(1) if x.ndim == 0 else x for x in tables]", "tables"),
        ],
    ),
    (
        "strategies/_on_device.py",
        "strategies/test_many_queries.py -k where_keys",
        [
            ("return lowering is XLA and _has", "return _has"),
            ("min(s, 8 * FEW)", "s"),
            ("0 < 8 * rows <= min(s, 8 * FEW)", "0 < rows <= FEW"),
        ],
    ),
    (
        "_sweep/loops.py",
        LAYER,
        [("pick(table, a, here) if moves(a) else table", "pick(table, a, here)")],
    ),
    (
        "strategies/_fold.py",
        LAYER,
        [
            ("if selection is not None or not lowering.reads_layers:", "if not lowering.reads_layers:"),
            ("if selection is not None or not lowering.reads_layers:", "if selection is not None:"),
        ],
    ),
    (
        "_sweep/grid.py",
        MESHES,
        [("any(a in self.batch for i in self.lookups for a in self.in_axes[i])", "bool(self.lookups)")],
    ),
    (
        "_sweep/grid.py",
        "cache/test_explicit_meshes.py",
        [("any(a in self.batch for i in self.lookups for a in self.in_axes[i])", "False")],
    ),
    (
        "_problem/key_shards.py",
        SHARES,
        [("else 1 + layers for flat in held.flat", "else 1 for flat in held.flat")],
    ),
    (
        "cache/_stacked_paged.py",
        SHARES,
        [("return pool_specs(self.stack, axis_name)", "return {}")],
    ),
    (
        "cache/_latent.py",
        SHARES,
        [("return self.cache._key_specs(axis_name)", "return {}")],
    ),
    (
        "cache/_base.py",
        SHARES,
        [("if x.shape[axis := len(specs[id(x)]) - 1] % devices:", "if False:")],
    ),
]
