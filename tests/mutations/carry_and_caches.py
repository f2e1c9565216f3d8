"""Mutants of the Carry and of caches."""
# fmt: off

CONTENTS = "cache/test_cache_contents.py"

MUTANTS = [
    (
        "_carry/rows.py",
        "test_carry.py",
        [
            ("jnp.maximum(origin, jnp.finfo(origin.dtype).min)", "jnp.maximum(origin, 0)"),
            ("jnp.maximum(origin, jnp.finfo(origin.dtype).min)", "origin"),
            ("return now, jnp.exp(logits - origin), scale", "return now, jnp.exp(logits), scale"),
            ("safe_max(maximum) + jnp.log(safe), -jnp.inf)", "safe_max(maximum) + jnp.log(safe), 0.0)"),
            ("jnp.where(seen, safe_max(maximum) + jnp.log(safe)", "jnp.where(seen, jnp.log(safe)"),
            ("return mean, row_mean(tangents[0] - mean * widened, denominator, False)", "return mean, row_mean(tangents[0], denominator, False)"),
            ("return jnp.concatenate([half, half[..., : n // 2]], -1)", "return jnp.concatenate([half, half[..., : n // 2] * 0], -1)"),
        ],
    ),
    (
        "_carry/rows.py",
        "test_carry.py -k 'denominator_of_zero or no_row_sees or maximum_that or ambiguous or oml or do_not_fit'",
        [
            ("return jnp.where(seen, total, 0) / jnp.where(seen, weight, 1)", "return total / jnp.where(seen, weight, 1)"),
        ],
    ),
    (
        "_carry/carry.py",
        "test_carry.py",
        [
            ("top, first = jnp.maximum(a, b), a >= b", "top, first = jnp.maximum(a, b), a <= b"),
            ("share = jnp.exp(jnp.minimum(a, b) - safe_max(top))", "share = jnp.exp(jnp.minimum(a, b))"),
            ("jnp.where(first, x, y) + jnp.where(first, y, x) * share", "jnp.where(first, x, y) * share + jnp.where(first, y, x)"),
            ("nothing = jnp.full((*logits.shape[:-1], 1), -jnp.inf, dtype)", "nothing = jnp.full((*logits.shape[:-1], 1), 0.0, dtype)"),
            ("lax.stop_gradient(top[..., 0])", "top[..., 0] * 0"),
            ("denominator = jnp.exp(sinks - safe_max(top)[..., None]).sum(-1)", "denominator = jnp.exp(sinks - safe_max(top)[..., None]).max(-1)"),
            ("seen = (maximum != -jnp.inf) & (denominator != 0)", "seen = denominator != 0"),
            ("jnp.full(shape, -jnp.inf, dtype),", "jnp.zeros(shape, dtype),"),
            ("ft.partial(jnp.einsum, precision=lax.Precision.HIGHEST)", "jnp.einsum", "on a CPU products of float32 are exact to rounding whatever the precision"),
        ],
    ),
    (
        "_carry/carry.py",
        "test_carry.py -k 'denominator_of_zero or no_row_sees or maximum_that or ambiguous or oml or do_not_fit'",
        [
            ("seen = (maximum != -jnp.inf) & (denominator != 0)", "seen = maximum != -jnp.inf"),
            ("denominator = jnp.where(seen, denominator, 0) * _weight(maximum)", "denominator = jnp.where(seen, denominator, 0)"),
            ("if sinks.ndim == 1 and shape and sinks.shape[0] == shape[-1] > 1:", "if False:"),
            ("if self.numerator.shape != other.numerator.shape:", "if False:"),
            ("return self.output(), self.max_so_far, self.denominator", "return self.numerator, self.max_so_far, self.denominator"),
        ],
    ),
    (
        "cache/_base.py",
        CONTENTS,
        [
            ("wrong = (lengths < 0) | (lengths > now)", "wrong = lengths < 0"),
            ("wrong = (lengths < 0) | (lengths > now)", "wrong = lengths > now"),
            ("wrong = (lengths < 0) | (lengths > now)", "wrong = (lengths < 0) | (lengths >= now)"),
            ("jnp.where(position < length[:, None], position, capacity + position), length", "position, length"),
            ("jnp.where(position < length[:, None], position, capacity + position), length", "jnp.where(position <= length[:, None], position, capacity + position), length"),
            ("return cache.length[:, None] + jnp.arange(t, dtype=jnp.int32)[None]", "return 0 * cache.length[:, None] + jnp.arange(t, dtype=jnp.int32)[None]"),
            ("within_capacity(cache.length + counts, capacity)", "within_capacity(cache.length + t, capacity)"),
        ],
    ),
    (
        "cache/_writes.py",
        CONTENTS,
        [
            ("store(held, new, (*first, OWN_ROW), slots)", "store(held, new, (*first, 0 * slots), slots)"),
            ("at = (slots * per)[:, None, :, None]", "at = slots[:, None, :, None]"),
            ("if flat else scatter for flat in held.flat", "if not flat else scatter for flat in held.flat"),
        ],
    ),
    (
        "_problem/stack_layer.py",
        "cache/test_own_form.py",
        [("if not new.keys() <= set(map(id, leaves)):", "if False:")],
    ),
    (
        "_problem/wide_sums.py",
        "conformance/test_narrow_sums.py -k 'two_visits or key_shards_round'",
        [("{n: widened(x, acc) for n, x in arrays.items()}", "{}")],
    ),
    (
        "strategies/_key_shards.py",
        "conformance/test_narrow_sums.py -k 'two_visits or key_shards_round'",
        [('problem = with_wide_sums(problem, lowering, "query")', "pass")],
    ),
    (
        "strategies/_listed_shards.py",
        "conformance/test_narrow_sums.py -k 'two_visits or key_shards_round'",
        [('problem = with_wide_sums(problem, XLA, "key", "value")', "pass")],
    ),
    (
        "_problem/selected.py",
        "conformance/test_narrow_sums.py -k 'two_visits or key_shards_round'",
        [("_wide_entries if wide else _entries", "_entries")],
    ),
    (
        "_problem/wide_sums.py",
        "conformance/test_narrow_sums.py -k 'two_visits or key_shards_round'",
        [('problem = with_wide_sums(problem, lowering, "query", *(() if in_place else ("key", "value")))', "pass")],
    ),
    (
        "_calls/cascade.py",
        "conformance/test_narrow_sums.py -k cascade",
        [
            ("query, key = query.astype(acc), wide_pages(key)", "return (query, key, value, strategy), scores"),
            ("scores = scores_in_sums(scores, acc, varying_axes(*filter(eqx.is_array, seen)))", "pass"),
        ],
    ),
    (
        "_tools/info.py",
        "tools/test_cli.py -k blocks_of_the_kernel",
        [("lowering=lowering,", "")],
    ),
    (
        "cache/_base.py",
        "cache/test_cache.py -k outside_of_jit",
        [("return (program if _is_simple(cache, arrays) else fn)(cache, *arrays)", "return fn(cache, *arrays)")],
    ),
    (
        "cache/_base.py",
        "cache/test_own_form.py",
        [
            ("return (program if _is_simple(cache, arrays) else fn)(cache, *arrays)", "return program(cache, *arrays)"),
            ("if not own or type(cache)", "if type(cache)"),
        ],
    ),
    (
        "cache/_base.py",
        "cache/test_automatic_meshes.py -k stays_where_it_is",
        [("return len(frozenset().union(*devices)) <= 1", "return True")],
    ),
    (
        "cache/_base.py",
        "cache/test_cache.py -k 'raise or errors or arguments or ints'",
        [
            ("wrong = (counts < 0) | (counts > key.shape[1])", "wrong = counts < 0"),
            ("raise_if(rows, (rows < 0) | (rows >= n)", "raise_if(rows, rows < 0"),
            ("return raise_if(length, length > capacity, message)", "return length"),
            ("fits = fits and (*value.shape[:2], *value.shape[2:]) == (b, key.shape[1], *value_heads)", "pass"),
            ("if counts.shape not in ((), (b,)):", "if False:"),
        ],
    ),
    (
        "cache/_ring_buffer.py",
        CONTENTS,
        [
            ("kept = position < length[:, None]", "kept = position >= 0"),
            ("kept = position < length[:, None]", "kept = position <= length[:, None]"),
            ("jnp.where(kept, self._places(position), capacity + position)", "jnp.where(kept, position, capacity + position)"),
            ("write(self.held, position, slots)", "self.held"),
            ("length = self.length + counts", "length = self.length + t"),
            ("jnp.where(self.held < lengths[:, None], self.held, -1)", "self.held"),
            ("jnp.where(self.held < lengths[:, None], self.held, -1)", "jnp.where(self.held <= lengths[:, None], self.held, -1)"),
            ("jnp.full((batch, capacity), -1, jnp.int32)", "jnp.full((batch, capacity), 0, jnp.int32)"),
        ],
    ),
    (
        "cache/_ring_buffer.py",
        "cache/test_ring_sinks.py",
        [
            ("jnp.where(position < first, position, first", "jnp.where(position <= first, 0, first"),
            ("first + (position - first) % turn", "first + position % turn"),
            ("first, turn = self.sinks, self.key.shape[1] - self.sinks", "first, turn = self.sinks, self.key.shape[1]"),
            ("if t > capacity - self.sinks:", "if t > capacity:"),
            ("0 < self.sinks >= keys[1]", "0 < self.sinks > keys[1]"),
            ("held, lengths, self.sinks)", "held, lengths)"),
        ],
    ),
    (
        "cache/_latent.py",
        "nn/test_layer_ring_sinks.py",
        [("return self.cache.keeps_first", "return 0")],
    ),
    (
        "cache/_contiguous.py",
        CONTENTS + " cache/test_cache.py -k 'contents or counts or truncate or reorder'",
        [
            ("write(self.value, value, slots), length)", "write(self.value, value, slots), self.length)"),
            ("check_lengths(lengths, self.length))", "self.length)"),
        ],
    ),
    (
        "cache/_paged.py",
        CONTENTS,
        [
            ("page = jnp.where(kept, page, held)", "page = jnp.where(kept, page, 0)"),
            ("page = jnp.where(kept, page, held)", "pass"),
            ("kept = position < length[:, None]", "kept = position <= length[:, None]"),
            ("part = jnp.minimum(position // size, parts - 1)", "part = jnp.minimum(position // size, 0)"),
            ("store(pool, new, (page, *layer), position % size, unique=False)", "store(pool, new, (page, *layer), position * 0, unique=False)"),
            ("eqx.tree_at(lambda c: c.length, self, check_lengths(lengths, self.length))", "eqx.tree_at(lambda c: c.length, self, lengths)"),
            ("with_doubled(self.table, self.length, rows)", "with_doubled(self.table, self.length, rows)[0], self.length"),
            ("jnp.where(rows[:, None], -1, table), jnp.where(rows, 0, length)", "table, jnp.where(rows, 0, length)"),
            ("jnp.where(rows[:, None], -1, table), jnp.where(rows, 0, length)", "jnp.where(rows[:, None], -1, table), length"),
        ],
    ),
    (
        "cache/_page_table.py",
        CONTENTS,
        [
            ("table = table[rows]\n", "pass\n"),
            ("wanted = -(-(length + counts) // page_size)", "wanted = (length + counts) // page_size"),
            ("wanted = -(-(length + counts) // page_size)", "wanted = -(-counts // page_size)"),
            ("empty = (part < wanted[:, None]) & (table == -1)", "empty = part < wanted[:, None]"),
            ("np.flatnonzero(users == 0)", "np.arange(pages)"),
            ("if mine.sum() > len(own):", "if False:"),
            ("(wanted > table.shape[1]).any()", "False"),
        ],
    ),
    (
        "cache/_stacked.py",
        CONTENTS,
        [
            ("write(self.stack.key, key, slots, self.index)", "write(self.stack.key, key, slots, 0 * self.index)"),
            ("self.stack.length.at[self.index].set(length)", "self.stack.length.at[0].set(length)"),
        ],
    ),
    (
        "_problem/storage.py",
        "cache/test_cache.py -k 'quantized or shares or eight'",
        [
            ("values = jnp.round(values)", "pass"),
            ("scales = jnp.abs(wide).max(-1, initial=0) / most", "scales = wide.max(-1, initial=0) / most"),
            ("values = wide / jnp.where(scales == 0, 1, scales)[..., None]", "values = wide / scales[..., None]"),
            ("scales.reshape(*lead, n, s, heads // n), -3, -2)", "scales.reshape(*lead, n, s, heads // n), -2, -2)"),
            ("if self.scales.shape[-2] == n:", "if True:"),
        ],
    ),
    (
        "cache/_writes.py",
        "cache/test_automatic_meshes.py",
        [
            ("shared = tuple(i for i, x in enumerate(at) if isinstance(x, int))", "at = tuple(jnp.arange(new.shape[x], dtype=jnp.int32).reshape(-1, *[1] * (new.ndim - held.ndim + len(at) - 1 - x)) if isinstance(x, int) else x for x in at); shared = ()"),
        ],
    ),
]
