"""Mutants of what is known of keys that devices share, of listed positions, and of narrow dtypes."""
# fmt: off

MUTANTS = [
    (
        "_problem/storage.py",
        "problem/test_attention_errors.py -k eight",
        [
            ("if jnp.dtype(dtype).itemsize < 2:", "if False:"),
        ],
    ),
    (
        "masks/_selected.py",
        "masks/test_selected_positions.py",
        [
            ("            check_distinct(kv_positions)\n", "            pass\n"),
            ("== rows[..., :-1]) & (rows[..., 1:] >= 0)", "== rows[..., :-1])"),
        ],
    ),
    (
        "masks/_selected.py",
        "cache/test_key_shards.py -k lists_of_keys",
        [
            ("elif not jax.sharding.get_abstract_mesh().manual_axes:", "else:"),
        ],
    ),
    (
        "_problem/selected.py",
        "masks/test_selected_positions.py -k mass",
        [
            ("return x.reshape(math.prod(lead), *x.shape[3:])", "return x.reshape(-1, *x.shape[3:])"),
            ("reshape(batch, rows_made, *x.shape[3:])", "reshape(batch, -1, *x.shape[3:])"),
        ],
    ),
    (
        "stats/_call.py",
        "stats/test_sharded.py",
        [
            ("return nothing if whole else vary(nothing, varying_axes(*jax.tree.leaves(self.key)))", "return nothing"),
            ("if axis in own and axis not in varying_axes(*jax.tree.leaves(self.key)):", "if False:"),
            ("return heads + jnp.zeros_like(self.key.sum((-2, -1)), self.dtype)[..., None, None, :]", "return jnp.zeros(self.keys, self.dtype)"),
        ],
    ),
    (
        "cache/_base.py",
        "cache/test_cache_contents.py",
        [
            ("lambda x: x[rows] if eqx.is_array(x) else x", "lambda x: x if x.ndim == 1 else x[rows]"),
            ("lambda x: x[rows] if eqx.is_array(x) else x", "lambda x: x if x.ndim == 2 else x[rows]"),
            ("lambda x: x[rows] if eqx.is_array(x) else x", "lambda x: x if x.ndim > 2 else x[rows]"),
        ],
    ),
    (
        "cache/_base.py",
        "cache/test_explicit_meshes.py",
        [
            ("    if not typed:\n        return run(cache, *args)\n", "    return run(cache, *args)\n"),
            ("whole = () if rows_stay else (None,)", "whole = ()"),
        ],
    ),
    (
        "stats/_top_keys.py",
        "stats/test_sharded.py -k explicit",
        [
            ("spec = P(*batch, heads, t, None)", "spec = P()"),
        ],
    ),
]
