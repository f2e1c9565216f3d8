"""Mutants of masks and of pair functions."""
# fmt: off

MASKS = "masks/test_masks.py -k 'definition or algebra or positions or sparsity or live or batch or errors'"
TREES = "masks/test_masks.py -k 'tree'"

MUTANTS = [
    (
        "masks/_base.py",
        MASKS,
        [
            ("np.all(terms, axis=0) if isinstance(mask, And) else np.any(terms, axis=0)", "np.all(terms, axis=0)"),
            ("np.all(terms, axis=0) if isinstance(mask, And) else np.any(terms, axis=0)", "np.any(terms, axis=0)"),
            ("if mask is None or any(set(o.axes) & set(\"ts\") for o in mask.operands()):", "if mask is None:"),
            ("return np.any(table > 0, axis=(0, 1))", "return np.all(table > 0, axis=(0, 1))"),
            ("return np.any(table > 0, axis=(0, 1))", "return np.any(table > 1, axis=(0, 1))"),
            ("functools.reduce(operator.and_, _each", "functools.reduce(operator.or_, _each"),
            ("functools.reduce(operator.or_, _each", "functools.reduce(operator.and_, _each"),
            ("return jnp.logical_not(self.term.visible(b, h, q, k, *ids))", "return self.term.visible(b, h, q, k, *ids)"),
            ("ids = ids[n:]", "pass"),
            ("terms += x.terms if isinstance(x, kind) else [x]", "terms += x.terms if isinstance(x, And | Or) else [x]"),
            ("return self.term if isinstance(self, Not) else Not(self)", "return Not(self)", "a mask that is negated twice is the same mask, only longer"),
            ("(\"\", \"s\", \"ts\", \"hts\", \"bhts\")", "(\"\", \"t\", \"ts\", \"hts\", \"bhts\")"),
            ("for axis in (3, 2, 1, 0):", "for axis in (2, 3, 1, 0):"),
            ("number((table == np.int8(c)).mean()) for c in (0, 1, 2)", "number((table == np.int8(c)).mean()) for c in (0, 2, 1)"),
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
        "masks/_tree.py",
        TREES,
        [
            ("range(max(n - 1, 1).bit_length())", "range(max(n - 1, 1).bit_length() - 1)"),
            ("range(max(n - 1, 1).bit_length())", "range(3)"),
            ("descends = (at(enter, j) <= at(enter, i)) & (at(enter, i) < at(leave, j))", "descends = at(enter, j) <= at(enter, i)"),
            ("(at(enter, i) < at(leave, j))", "(at(enter, i) <= at(leave, j))"),
            ("return jnp.where(both, descends, k <= q)", "return descends & (k <= q)"),
            ("return jnp.where(both, descends, k <= q)", "return jnp.where(both, descends, k < q)"),
            ("jnp.asarray(table)[row * n + jnp.clip(i, 0, n - 1)]", "jnp.asarray(table)[jnp.clip(i, 0, n - 1)]"),
            ("i, j = q - start, k - start", "i, j = q, k"),
            ("step = step + (parents >= 0).astype(np.int32)", "pass"),
            ("own[..., None, :] < own[..., :, None]", "own[..., None, :] > own[..., :, None]", "siblings are walked in the other order, which is a preorder too"),
            ("return enter, enter + size", "return enter, enter + size - 1"),
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
            ("ok = ok and all(n in (1, m) for n, m in zip(padded, batch_shape))", "pass"),
            ("padded = (1,) * (len(batch_shape) - len(lead)) + tuple(lead)", "padded = tuple(lead) + (1,) * (len(batch_shape) - len(lead))"),
            ("for axis in (1, 0):", "for axis in (0, 1):", "`jax.vmap` over arguments of one axis less finds the same results where both sides have one size"),
        ],
    ),
]
