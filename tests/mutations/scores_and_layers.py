"""Mutants of scores, dropout and layers."""
# fmt: off

SCORES = "scores/test_scores.py"
DROPOUT = (
    "scores/test_dropout.py -k 'known_answers or generator_of_jax or not_one_key or rate or weights_show"
    " or flattening or oracle or follow_positions or all_words'"
)

MUTANTS = [
    (
        "scores/_dropout.py",
        DROPOUT,
        [
            ("_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))", "_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 25))"),
            ("_PARITY = np.uint32(0x1BD11BDA)", "_PARITY = np.uint32(0x1BD11BDB)"),
            ("for i in range(5):", "for i in range(4):"),
            ("y = y + words[(i + 2) % 3] + np.uint32(i + 1)", "y = y + words[(i + 2) % 3] + np.uint32(i)"),
            ("return x >= np.int32(", "return x < np.int32("),
            ("min(round(rate * 2**32), 2**32 - 1)", "round(rate * 2**31)"),
            ("min(round(rate * 2**32), 2**32 - 1)", "round(rate * 2**32)"),
            ("x = k * _GOLDEN + words[0]", "x = k + words[0]"),
            ("x = shifted(x, 16) * _FIRST + words[1]", "x = shifted(x, 16) * _FIRST"),
            ("x = shifted(x, 15) * _SECOND", "x = shifted(x, 16) * _SECOND"),
            ("lax.shift_right_logical(x,", "lax.shift_right_arithmetic(x,"),
            ("return 2**32 / (2**32 - dropped(rate))", "return 1 / (1 - rate)"),
            ("stream = threefry((seed[0], seed[1]), (b, h))", "stream = threefry((seed[0], seed[1]), (b, b))"),
            ("threefry(stream, (q, jnp.zeros_like(q)))", "threefry(stream, (jnp.zeros_like(q), q))"),
            ("if not 0 <= rate < 1:", "if not 0 <= rate <= 1:"),
            ("if key.ndim != 0:", "if False:"),
        ],
    ),
    (
        "scores/_dropout.py",
        "ring/test_heads.py -k dropout",
        [
            ("b, h = b + seed[2], h + seed[3]", "pass"),
        ],
    ),
    (
        "_problem/dropout.py",
        "scores/test_dropout.py ring/test_contexts.py ring/test_heads.py -k 'dropout or weights_show or tail or gradients_under'",
        [
            ("if spread.inside:", "if False:"),
            ("h.reshape(h.shape[0], problem.sizes[3], -1)", "h.reshape(h.shape[0], -1, 1)"),
            ("np.asarray(kept_factor(problem.rate), dtype)", "np.asarray(1, dtype)"),
        ],
    ),
    (
        "scores/_alibi.py",
        SCORES + " -k 'libi or ALiBi'",
        [
            ("slope.astype(logit.dtype) * abs(q - k).astype(logit.dtype)", "slope.astype(logit.dtype) * (q - k).astype(logit.dtype)"),
            ("(-8 * (i + 1) / power)", "(-8 * i / power)"),
            ("(-4 * (2 * i + 1) / power)", "(-4 * (2 * i + 2) / power)"),
        ],
    ),
    (
        "scores/_t5.py",
        SCORES + " -k 't5 or T5'",
        [
            ("jnp.where(distance < 0, buckets, 0)", "jnp.where(distance <= 0, buckets, 0)"),
            ("jnp.where(distance < exact, distance, jnp.minimum(far, buckets - 1))", "jnp.where(distance < exact, distance, far)"),
            ("exact = buckets // 2\n        ratio", "exact = buckets // 4\n        ratio"),
            ("distance = jnp.maximum(distance, 0)", "distance = abs(distance)"),
            ("ratio = ratio / float(np.log(self.max_distance / exact))", "ratio = ratio / float(np.log(self.max_distance))"),
        ],
    ),
    (
        "scores/_soft_cap.py",
        SCORES + " -k 'cap or Cap'",
        [
            ("return cap * jnp.tanh(logit / cap)", "return jnp.tanh(logit / cap)"),
        ],
    ),
    (
        "_misc/__init__.py",
        SCORES + " -k 'cap or Cap'",
        [
            ("(np.isfinite(known) & (known != 0) & (learned | (known > 0)))", "((known != 0) & (learned | (known > 0)))"),
            ("(np.isfinite(known) & (known != 0) & (learned | (known > 0)))", "(np.isfinite(known) & (learned | (known > 0)))"),
            ("(np.isfinite(known) & (known != 0) & (learned | (known > 0)))", "(np.isfinite(known) & (known != 0) & (known > 0))"),
            ("(np.isfinite(known) & (known != 0) & (learned | (known > 0)))", "(np.isfinite(known) & (known != 0))"),
        ],
    ),
    (
        "nn/_rotary_scaling.py",
        "nn/test_rotary.py -k 'scaling or yarn or llama or error or traced'",
        [
            ("low, high = xp.maximum(low, 0.0), xp.minimum(high, dim - 1.0)", "low, high = xp.maximum(low, 0.0), high"),
            ("low, high = xp.maximum(low, 0.0), xp.minimum(high, dim - 1.0)", "low, high = low, xp.minimum(high, dim - 1.0)"),
            ("low, high = xp.maximum(low, 0.0), xp.minimum(high, dim - 1.0)", "low, high = xp.maximum(low, 0.0), xp.minimum(high, dim // 2 - 1.0)"),
            ("low, high = xp.floor(low), xp.ceil(high)", "low, high = xp.ceil(low), xp.floor(high)"),
            ("xp.where(high > low, high - low, 0.001)", "xp.where(high > low, high - low, 1.0)"),
            ("return plain / self.factor * slow + plain * (1 - slow)", "return plain / self.factor * (1 - slow) + plain * slow"),
            ("0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0", "0.1 * math.log(self.factor) + 1"),
            ("dim / (dim - 2)", "dim / (dim - 1)"),
            ("return plain_frequencies(dim, theta) / self.factor", "return plain_frequencies(dim, theta) * self.factor"),
            ("turns = plain * (self.original_length / (2 * math.pi))", "turns = plain * self.original_length"),
            ("fast = xp.clip((turns - self.low_freq_factor) / span, 0.0, 1.0)", "fast = (turns - self.low_freq_factor) / span"),
            ("if self.beta_fast < self.beta_slow:", "if False:"),
        ],
    ),
    (
        "nn/_rotary.py",
        "nn/test_rotary.py",
        [
            ("new = left * cos - right * sin, right * cos + left * sin", "new = left * cos + right * sin, right * cos - left * sin"),
            ("jnp.where(positions < 0, -angle, angle)", "angle"),
            ("phase = distance * high + _upper_product(distance, low)", "phase = distance * high"),
            ("return a1 * b1 + (middle >> half) + (other >> half)", "return a1 * b1 + (middle >> half)"),
            ("cos, sin = cos * amplitude, sin * amplitude", "pass"),
            ("jnp.concatenate([turning, x[..., dim:]], -1)", "jnp.concatenate([x[..., dim:], turning], -1)"),
            ("if chosen % 2 or not 0 <= chosen <= size:", "if not 0 <= chosen <= size:"),
            ("jnp.stack(new, -1).reshape(x.shape) if interleaved else", ""),
        ],
    ),
    (
        "nn/_dropout.py",
        "nn/test_multihead.py -k 'dropout or inference'",
        [
            ("inference = float(inference)", "pass"),
            ("if p is None or stopped is None:", "if False:"),
        ],
    ),
    (
        "nn/_dropout.py",
        "nn/test_multihead.py -k 'number_for or ensembles_by'",
        [
            ("off = bool(p == 0) if settings else", "off = bool(p == 0) if _is_number(p) else"),
            ("(inference in (0, 1) and not both_integers)", "inference in (0, 1)"),
            ("(inference in (0, 1) and not both_integers)", "not both_integers"),
        ],
    ),
    (
        "nn/_heads.py",
        "nn/test_multihead.py -k several_dtypes",
        [("dtype = jnp.result_type(*heads)", "dtype = heads[-1].dtype")],
    ),
    (
        "nn/_arguments.py",
        "nn/test_multihead.py -k 'mask or window or error or strateg'",
        [
            ("return SlidingWindow(*window) if mask is None else mask & SlidingWindow(*window)", "return mask"),
            ("if value is not None and not (name == \"dropout_prob\" and value == 0):", "if False:"),
            ("mask != xp.zeros((), mask.dtype)", "mask == xp.zeros((), mask.dtype)"),
        ],
    ),
    (
        "nn/_cached_call.py",
        "nn/test_layer_cache.py",
        [
            ("return cache, cache.mask() if mask is None else mask & cache.mask()", "return cache, cache.mask()"),
            ("least = first + window[0] + tokens", "least = first + window[0]"),
            ("return self.mask.visible(b, h, k + q, k, *ids)", "return self.mask.visible(b, h, q, k, *ids)"),
            ("if cache.key.dtype != key_.dtype:", "if False:"),
            ("first = jnp.clip(query - reach, 0, length)", "first = jnp.clip(query - reach, 0, length) + 1"),
            (
                'first = jnp.asarray(positions_in_reach(q_positions, "q_positions")).min(-1)',
                "pass",
            ),
            (
                'jnp.asarray(positions_in_reach(q_positions, "q_positions")).min(-1)',
                "q_positions.min(-1)",
            ),
            ("there < length - first,", "there < 0,"),
            ("most = int(tried[showing]) if showing < len(tried) else most", "most = int(tried[showing]) + 1 if showing < len(tried) else most; break"),
            ("return key_, key_ if value is None", "return key_, query if value is None"),
        ],
    ),
]
