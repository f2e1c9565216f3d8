"""Mutants of maps over some axes of a mesh, of layers that share pages, and of what a ring buffer lacks."""
# fmt: off

MAPS = "ring/test_own_partial_maps.py"
LAYERS = "cache/test_shared_pages.py -k layers"

MUTANTS = [
    (
        "_problem/mesh.py",
        MAPS,
        [
            ("where = [list(once).index(id(x)) for x in leaves]", "where = list(range(len(leaves)))"),
            ("if names == set(mesh.axis_names):", "if True:"),
            ("return bool(varying_axes(problem.query, problem.key, problem.value))", "return False"),
        ],
    ),
    (
        "_problem/fold.py",
        MAPS,
        [("read = dict(mask=problem.mask, scores=problem.scores)", "read = dict(mask=problem.mask)")],
    ),
    (
        "_problem/closed_score.py",
        MAPS,
        [("[vary(jnp.asarray(x), axes) for x in xs] for xs in (closed.consts, scalars)", "list(xs) for xs in (closed.consts, scalars)")],
    ),
    (
        "_problem/selected.py",
        MAPS,
        [("HeldScore.of(s, acc, x, axes=axes)", "HeldScore.of(s, acc, x)")],
    ),
    (
        "strategies/_sharded.py",
        MAPS,
        [("place.gathers and not types_are_checked(problem)", "place.gathers")],
    ),
    (
        "strategies/_key_shards.py",
        MAPS,
        [("whole(of_scores(sharded), mesh, {axis})", "of_scores(sharded)")],
    ),
    (
        "cache/_stacked_paged.py",
        LAYERS,
        [
            ("self, self.length, counts", "self, self.length.max(0), counts"),
            ("with_doubled(self.table, self.length.T, rows)", "self.table[rows], self.length.T[rows]"),
        ],
    ),
    (
        "cache/_page_table.py",
        LAYERS,
        [
            ("(length.min(0), length.max(0))", "(length.max(0), length.max(0))"),
            ("max(len(length), kept.sum())", "len(length)"),
        ],
    ),
    (
        "nn/_cached_call.py",
        "nn/test_layer_cache.py -k 'knows_what or list_of_keys'",
        [
            ("np.arange(1024)", "np.arange(8)"),
            ("term if term.selects else _Away(term)", "_Away(term)"),
            ("if showing else least", "if showing > 1 else least"),
        ],
    ),
    (
        "nn/_cached_call.py",
        "nn/test_layer_ring_sinks.py",
        [
            ("most = capacity - first - tokens", "most = capacity - tokens"),
            ("least = first + window[0] + tokens", "least = window[0] + tokens"),
            ("first + np.arange(1024), np.maximum(keys, first)", "np.arange(1024), keys"),
            ("_size(sinks + reach + tokens, sinks)", "_size(reach + tokens, sinks)"),
            ("if sinks > 1024 or most >= far:", "if most >= far:"),
        ],
    ),
    (
        "nn/_cached_call.py",
        "nn/test_layer_cache.py -k test_errors",
        [("if one and np.ndim(of_rows[1]):", "if False:")],
    ),
    (
        "_problem/arguments.py",
        "problem/test_attention_errors.py cache/test_nothing.py -k 'positions'",
        [("\"bt\" if own else \"bs\"", "\"bt\"")],
    ),
]
