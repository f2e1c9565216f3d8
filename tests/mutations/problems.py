"""Mutants of one call: its operands, blocks and classes."""
# fmt: off

ERRORS = "problem/test_attention_errors.py -k eval_shape"
CALLS = "strategies/test_laws.py sweep/test_transforms.py -k 'value or split or whole_blocks or grouped'"

MUTANTS = [
    (
        "_problem/problem.py",
        ERRORS,
        [("if scale is not None and jnp.ndim(scale) > 0:", "if False:")],
    ),
    (
        "_problem/arguments.py",
        ERRORS,
        [
            ("if q_offset is not None and q_positions is not None:", "if False:"),
            ("if sinks.ndim == 2 and sinks.shape[0] in (1, heads):", "if sinks.ndim == 2:"),
        ],
    ),
    (
        "_problem/arguments.py",
        "problem/test_attention_errors.py -k two_to_the_thirty",
        [
            ("n > REACH", "n > 2 * REACH"),
            ("(query.shape[-3], key.shape[-3])", "(query.shape[-3],)"),
        ],
    ),
    (
        "_problem/problem.py",
        "problem/test_offsets.py",
        [
            ("+ np.int32(self.q_start)", "- np.int32(self.q_start)"),
            ("q = q if self.q_shift is None else q + self.q_shift", "pass"),
        ],
    ),
    (
        "_problem/problem.py",
        CALLS,
        [
            ("scale=_scale_of(metadata, query.shape)", "scale=_scale_of(metadata, value.shape)"),
            ("else (SoftCap(soft_cap), *scores)", "else (*scores, SoftCap(soft_cap))"),
        ],
    ),
    (
        "_problem/arguments.py",
        CALLS,
        [("return sinks[:, None]", "return sinks[None]")],
    ),
    (
        "_problem/block_classes.py",
        "kernels/test_tpu_lists.py -k corners",
        [
            ("parts = 2 if blocking.group == 1 else 1", "parts = 1"),
            ("skipped = fine[:, :, ::parts, 1::2] == EMPTY", "skipped = fine[:, :, ::parts, ::2] == EMPTY"),
            ("constant_values=True)", "constant_values=False)", "the last block then counts as partial"),
            ("xp.where((table == PARTIAL) & skipped", "xp.where(skipped"),
        ],
    ),
    (
        "_problem/block_classes.py",
        CALLS,
        [
            ("table = xp.where(last & (table == FULL), np.int8(PARTIAL), table)", "pass"),
            ("last = np.arange(blocking.columns) == blocking.columns - 1", "last = np.arange(blocking.columns) == 0"),
        ],
    ),
    (
        "_problem/blocking.py",
        CALLS,
        [
            ("x = x.transpose(0, 2, 4, 1, 3, *range(5, x.ndim))", "x = x.transpose(0, 2, 4, 3, 1, *range(5, x.ndim))"),
            ("x = x.transpose(0, 3, 1, 5, 4, 2)", "x = x.transpose(0, 4, 1, 5, 3, 2)"),
        ],
    ),
    (
        "_problem/exchange.py",
        "ring/test_heads.py -k 'own_shard_map or eager'",
        [
            ("return merged_axes(lax.all_to_all(x, self.axis, at + 1, at + 1), at)", "return merged_axes(x, at)"),
            ("lax.dynamic_index_in_dim(x, index, at + 1, keepdims=False)", "lax.dynamic_index_in_dim(x, 0 * index, at + 1, keepdims=False)"),
            ("times = math.lcm(kv_heads, shares) // kv_heads", "times = shares"),
        ],
    ),
    (
        "_problem/jit_cache.py",
        "problem/test_jit_cache.py test_closure.py -k 'own or freed'",
        [
            ("(type(x), x)", "(None, x)"),
            ("node = node.of(owner())", "pass"),
            ("weakref.WeakKeyDictionary()", "{}"),
        ],
    ),
    (
        "_problem/mesh.py",
        "kernels/test_tpu_meshes.py -k found",
        [
            ("if name in free and size % mesh.shape[name] == 0:", "if name in free:"),
        ],
    ),
    (
        "_problem/mesh.py",
        "ring/test_heads.py -k 'own_shard_map or eager'",
        [
            ("return ROW if ROW in axes else COL", "return COL"),
        ],
    ),
    (
        "_problem/problem.py",
        "scores/test_scores.py -k order_of_operations",
        [
            ("scores = (as_bias(bias), *scores)", "scores = (*scores, as_bias(bias))"),
        ],
    ),
    (
        "_problem/blocking.py",
        "kernels/test_tpu_lists.py -k corners",
        [
            ("return self.block_q // 2 if self.group == 1 else self.group * self.block_q", "return self.block_q // 2"),
        ],
    ),
    (
        "_problem/blocking.py",
        "cache/test_cache.py -k blocks_of_keys",
        [
            ("if len(pages | ({block_k} if pages and block_k else set())) > 1:", "if False:"),
        ],
    ),
]
