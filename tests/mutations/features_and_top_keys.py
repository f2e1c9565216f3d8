"""Mutants of operands with features, of the ranking of keys, of lists over devices, and of grids."""
# fmt: off

FEATURES = "scores/test_features.py"
RANKED = "test_top_keys.py -k 'blockwise or equal_logits or nothing or errors'"
LISTED = "masks/test_selected.py -k ones_own"
GRIDS = "masks/test_neighbourhood.py -k 'definition or skipped or errors or axes'"

MUTANTS = [
    (
        "_pairs.py",
        FEATURES,
        [
            ('return tuple(self.array.shape[-1:]) if self.axes.endswith("f") else ()', "return ()"),
        ],
    ),
    (
        "_problem/closed_score.py",
        FEATURES,
        [
            ("return zero_nonfinite(x) if _is_float(x) else x", "return x"),
            ("return jnp.where(seen, here, lax.stop_gradient(there))", "return here"),
        ],
    ),
    (
        "strategies/_in_kernels.py",
        FEATURES,
        [
            ('if any(x.endswith("f") for x in axes):', "if False:"),
        ],
    ),
    (
        "_sweep/top.py",
        RANKED,
        [
            ("lax.sort((values, -places), num_keys=2)", "lax.sort((values, places), num_keys=2)"),
            ("jnp.where(values == -jnp.inf, jnp.int32(NONE), places)", "places"),
            ("jnp.where(places[slot] == wanted, jnp.take_along_axis(x.T, slot, 1), 0)", "jnp.take_along_axis(x.T, slot, 1)"),
            ("slot = order[jnp.minimum(at, len(places) - 1)]", "slot = jnp.minimum(at, len(places) - 1)"),
        ],
    ),
    (
        "stats/_top_keys.py",
        RANKED,
        [
            ("if n > shape[-3] * shards:", "if n >= shape[-3] * shards:"),
            ("if term.selects:", "if False:"),
        ],
    ),
    (
        "strategies/_listed_shards.py",
        LISTED,
        [
            ("for name in reversed(axes):", "for name in ():"),
            ("if not place.layout.in_order(place.size) or looked_up:", "if looked_up:"),
            ("x.shape[3] == s and x.shape[2] == 1", "False"),
        ],
    ),
    (
        "masks/_neighbourhood.py",
        GRIDS,
        [
            ("clip(x - window // 2, 0, n - window)", "clip(x - window // 2, 0, n)"),
            ("found.append(x - (window - 1))", "found.append(x - window)"),
            ("sizes.append(tile if n % tile == 0 else xp.minimum(left, tile))", "sizes.append(tile)"),
            ("ok = (places >= 0) & (places < self.grid.tokens)", "ok = places >= 0"),
            ("(low <= k) & (k < low + w)", "(low <= k) & (k <= low + w)"),
            ("return self._take(x, axis, np.argsort(self._row_by_row()))", "return self._take(x, axis, self._row_by_row())"),
        ],
    ),
]
