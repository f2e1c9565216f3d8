"""Mutants of masks and of pair functions."""
# fmt: off

MASKS = "masks/test_masks.py -k 'definition or algebra or positions or sparsity or live or batch or errors'"
TREES = "masks/test_trees.py masks/test_masks.py -k 'tree or mask_sees or values_and or functions_of'"

MUTANTS = [
    (
        "masks/_base.py",
        MASKS,
        [
            ("functools.reduce(operator.and_, _each", "functools.reduce(operator.or_, _each"),
            ("functools.reduce(operator.or_, _each", "functools.reduce(operator.and_, _each"),
            ("return jnp.logical_not(self.term.visible(b, h, q, k, *ids))", "return self.term.visible(b, h, q, k, *ids)"),
            ("ids = ids[n:]", "pass"),
            ("terms += x.terms if isinstance(x, kind) else [x]", "terms += x.terms if isinstance(x, And | Or) else [x]"),
            ("return self.term if isinstance(self, Not) else Not(self)", "return Not(self)", "a mask that is negated twice is the same mask, only longer"),
            ("(\"\", \"s\", \"ts\", \"hts\", \"bhts\")", "(\"\", \"t\", \"ts\", \"hts\", \"bhts\")"),
            ("for axis in (3, 2, 1, 0):", "for axis in (2, 3, 1, 0):"),
            ("map(share, (0, 1, 2))", "map(share, (0, 2, 1))"),
            ("visible = full if known and partial == 0.0 and full in (0.0, 1.0) else None", "visible = full if known else None"),
            ("np.arange(n, dtype=np.int32) if x is None else pos", "np.arange(n, dtype=np.int32) if True else pos"),
            ("full = jnp.broadcast_to(out, (math.prod(batch_shape), heads, t, s))", "full = jnp.broadcast_to(out[:, :1], (math.prod(batch_shape), heads, t, s))"),
        ],
    ),
    (
        "masks/_causal.py",
        MASKS,
        [
            ("return k <= (q if ids == () and offset == 0 else q + offset)", "return k < (q if ids == () and offset == 0 else q + offset)"),
            ("return k <= (q if ids == () and offset == 0 else q + offset)", "return k <= q"),
            ("return (k < prefix) | (k <= q)", "return (k <= prefix) | (k <= q)"),
            ("return (k < prefix) | (k <= q)", "return k < prefix"),
            ("return _chunk(k, self.size) <= _chunk(q, self.size)", "return _chunk(k, self.size) < _chunk(q, self.size)"),
            ("(_chunk(k, self.size) == _chunk(q, self.size)) & (k <= q)", "_chunk(k, self.size) == _chunk(q, self.size)"),
            ("size.bit_length() - 1", "size.bit_length()"),
            ("if size & (size - 1):", "if False:"),
        ],
    ),
    (
        "masks/_window.py",
        MASKS,
        [
            ("[distance <= self.left]", "[distance < self.left]"),
            ("[distance >= -self.right]", "[distance > -self.right]"),
            ("q - (jnp.maximum(k, self.sinks) if self.sinks else k)", "q - k", "the clamp only makes bounds of blocks exact: `sinks` keys are visible anyway"),
            ("return (k < self.sinks) | inside", "return (k <= self.sinks) | inside"),
            ("None if right is None else as_int(right, \"right\"", "None if right is None else as_int(left, \"right\""),
        ],
    ),
    (
        "masks/_segments.py",
        MASKS,
        [
            ("return (q_low <= k_high) & (k_low <= q_high)", "return q_low <= k_high"),
            ("return (q_low <= k_high) & (k_low <= q_high)", "return (q_high <= k_high) & (k_low <= q_low)"),
            ("xp.where(ids < ids.dtype.type(0), limit, ids)", "ids"),
            ("xp.where(ids < ids.dtype.type(0), limit, ids)", "xp.where(ids <= ids.dtype.type(0), limit, ids)"),
            ("self.q_ids if kv_ids is None else as_ids(kv_ids", "self.q_ids if True else as_ids(kv_ids"),
        ],
    ),
    (
        "masks/_padding.py",
        MASKS,
        [
            ("return (k >= start) & (k < length)", "return (k >= start) & (k <= length)"),
            ("return (k >= start) & (k < length)", "return k < length"),
            ("return (k >= start) & (k < length)", "return (k > start) & (k < length)"),
            ("return q < length", "return q <= length"),
            ("int_operand(self._lengths) + int_operand(self._starts)", "int_operand(self._starts) + int_operand(self._lengths)"),
        ],
    ),
    (
        "masks/_terms.py",
        MASKS,
        [
            ("np.all(terms, axis=0) if isinstance(mask, And) else np.any(terms, axis=0)", "np.all(terms, axis=0)"),
            ("np.all(terms, axis=0) if isinstance(mask, And) else np.any(terms, axis=0)", "np.any(terms, axis=0)"),
            ("if mask is None or mask.selects or any(set(o.axes) & set(\"ts\") for o in mask.operands()):", "if mask is None:"),
            ("return np.any(table > 0, axis=(0, 1))", "return np.all(table > 0, axis=(0, 1))"),
            ("return np.any(table > 0, axis=(0, 1))", "return np.any(table > 1, axis=(0, 1))"),
        ],
    ),
    (
        "masks/_terms.py",
        TREES,
        [
            ("return movers[0].positions_of(places) if movers else places", "return places"),
            ("if not _equal(movers[0], other):", "if False:"),
            ("return Not(map_terms(mask.term, fn))", "return map_terms(mask.term, fn)"),
            ("lead = lambda x: x.reshape(*(batch_shape if x.shape[0] != 1 else ()), x.shape[-1])", "lead = lambda x: x[0]"),
            ("if moved and not (isinstance(mask, AbstractMask) and mask.moves_positions):", "if False:"),
        ],
    ),
    (
        "masks/_tree.py",
        TREES,
        [
            ("xp.where(inside, start + depth, places)", "xp.where(inside, depth, places)"),
            ("xp.where(inside, start + depth, places)", "places"),
            ("left = xp.searchsorted(xp.sort(leave), enter, side=\"right\")", "left = xp.searchsorted(xp.sort(leave), enter, side=\"left\")"),
            ("return (low <= last) & (first < high)", "return low <= last"),
            ("return (low <= last) & (first < high)", "return (low <= last) & (first <= high)"),
            ("return (low <= last) & (first < high)", "return (low < last) & (first < high)"),
            ("xp.where(inside, start + leave, _NEVER)", "xp.where(inside, start + leave, start)"),
            ("xp.minimum(place, start - np.int32(1))", "place"),
            ("(2 * size).bit_length()", "(2 * size).bit_length() - 1"),
            ("(2 * size).bit_length()", "3"),
            ("has_sibling = (sorted_above[after] == above) &", "has_sibling ="),
            ("ahead[:size] = 1", "ahead[:] = 1"),
            ("above = xp.where(above < 0, np.int32(size), above + row)", "above = xp.where(above < 0, np.int32(size), above)"),
            ("take = lambda x, ndim: jnp.asarray(x)[row] if jnp.ndim(x) > ndim else x", "take = lambda x, ndim: x"),
        ],
    ),
    (
        "masks/_packed.py",
        "masks/test_packed.py",
        [
            ("side=\"right\"", "side=\"left\""),
            ("xp.where(inside, ids, np.int32(-1))", "ids"),
            ("xp.where(inside, token - start, np.int32(0))", "token - start"),
            ("known[-1] > tokens", "False"),
            ("(np.diff(known) < 0).any()", "(np.diff(known) <= 0).any()"),
        ],
    ),
    (
        "_pairs.py",
        MASKS,
        [
            ("ok = ok and all(n in (1, sizes[a]) for a, n in zip(tail, rest))", "pass"),
            ("padded = (1,) * (len(batch_shape) - len(lead)) + tuple(lead)", "padded = tuple(lead) + (1,) * (len(batch_shape) - len(lead))"),
            ("for axis in (1, 0):", "for axis in (0, 1):", "`jax.vmap` over arguments of one axis less finds the same results where both sides have one size"),
        ],
    ),
    (
        "_pairs.py",
        "masks/test_intervals.py -k errors",
        [
            ("ok = ok and all(n in (1, m) for n, m in zip(padded, batch_shape))", "pass"),
        ],
    ),
]
