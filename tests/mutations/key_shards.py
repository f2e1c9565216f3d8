"""Mutants of attention whose keys are sharded over devices."""
# fmt: off

SHARDS = "cache/test_key_shards.py"

MUTANTS = [
    (
        "_problem/key_shards.py",
        SHARDS,
        [
            ("top = lax.pmax(lax.stop_gradient(carry.max_so_far), axis)", "top = lax.stop_gradient(carry.max_so_far)"),
            ("sums = carry.numerator * share[..., None], carry.denominator * share", "sums = carry.numerator, carry.denominator"),
            ("positions = (index * size + iota(size))[None]", "positions = (0 * index + iota(size))[None]"),
            ("x = x.reshape(*lead, -1, n, page, *last)", "x = x.reshape(*lead, n, -1, page, *last).swapaxes(at, at + 1)"),
            ("else 2 if flat else 1 + layers for flat", "else 1 + layers for flat"),
            ("if not self.paged and not inside and x.shape[1] % n:", "if False:"),
        ],
    ),
    (
        "_problem/key_shards.py",
        "conformance/test_where_keys_lie.py",
        [
            ("problem = problem.at_places(lists=False)", "problem"),
            ("one = (math.prod(problem.batch_shape),)", "one = problem.batch_shape"),
        ],
    ),
    (
        "_problem/storage.py",
        SHARDS + " -k pages",
        [
            ("table - index * self.stored.shape[0]", "table"),
            ("self._table.reshape(self._table.shape[0], -1, self.devices)", "self._table.reshape(self._table.shape[0], self.devices, -1).swapaxes(1, 2)"),
        ],
    ),
    (
        "cache/_page_table.py",
        SHARDS + " -k pages",
        [
            ("mine[:, share::devices] = (empty | copied)[:, share::devices]", "mine[:] = empty | copied"),
        ],
    ),
    (
        "cache/_paged.py",
        SHARDS + " -k pages",
        [
            ("-(-capacity // (page_size * devices)) * devices", "-(-capacity // page_size)"),
        ],
    ),
    (
        "cache/_stacked_paged.py",
        SHARDS + " -k layers",
        [
            ("table * self.stack.length.shape[0] + self.index", "table * self.stack.length.shape[0]"),
            ("self.stack.length.at[self.index].set(length)", "self.stack.length.at[0].set(length)"),
        ],
    ),
    (
        "_problem/key_shards.py",
        "conformance/test_narrow_sums.py -k of_their_keys",
        [
            ("return widened(x, acc) if on_every_device(x, paged) else x", "return x"),
        ],
    ),
    (
        "_problem/key_shards.py",
        SHARDS + " -k in_pages",
        [
            ("return paged or operand.shape[key_axis(operand)] == 1", "return operand.shape[key_axis(operand)] == 1"),
        ],
    ),
    (
        "_problem/key_shards.py",
        "conformance/test_narrow_sums.py -k of_their_keys",
        [
            ("scale=jnp.asarray(rest.scale, acc), batch_shape=one", "batch_shape=one"),
        ],
    ),
]
