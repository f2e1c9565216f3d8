"""Mutants of what masks and scores look up outside of kernels."""
# fmt: off

LOOKUPS = "kernels/test_lookups.py strategies/test_supports.py -k 'lookup or found or kernel'"

MUTANTS = [
    (
        "_problem/lookups.py",
        LOOKUPS,
        [
            ("None if a is None or {\"t\", \"s\"} <= set(a) else set(a)", "set(a or ())"),
            ("within = None if within is not None and len({\"t\", \"s\", \"d\"} & within) > 1 else within", "pass"),
            ("looked = not (eqn.primitive in _CHEAP or only_varies(eqn)) or reads", "looked = not (eqn.primitive in _CHEAP or only_varies(eqn))"),
            ("if not found or any(v.aval.shape != () for v in found):", "if not found:"),
            ("lead = () if x.shape[0] == 1 else problem.batch_shape", "lead = () if x.shape[0] == 1 else (x.shape[0],)"),
            ("found |= {v: about[v] for v in jaxpr.outvars if not isinstance(v, Literal)}", "pass"),
        ],
    ),
    (
        "_problem/found.py",
        LOOKUPS,
        [("\"b\", \"bh\", \"bt\", \"bs\", *[o.axes", "\"b\", \"h\", \"bt\", \"bs\", *[o.axes")],
    ),
    (
        "_problem/tables.py",
        "kernels/test_tables.py",
        [
            ("jnp.clip(places[i].astype(jnp.int32), 0, n - 1)", "places[i].astype(jnp.int32)"),
            ("at = at * np.int32(n) + ", "at = at + "),
            ("shared = all(\"h\" not in x for x, _ in (apart if side == \"s\" else rest))", "shared = True"),
            ("few = math.prod(shape[i] for i in by[side]) <= MOST_PLACES", "few = True"),
            ("y.astype(jnp.float32) for y in (x >> 16, x & 0xFFFF)", "y.astype(jnp.float32) for y in (x >> 8, x & 0xFF)"),
            ("return [jnp.where(x == -jnp.inf, _LEAST, x)]", "return [x]"),
            ("both = [(x, picks) if reading.by_key else (picks, x) for x in entries]", "both = [(x, picks) for x in entries]"),
            ("return dot(picks, vectors, (1, 0), precision=lax.Precision.HIGHEST)", "return dot(picks, vectors, (1, 0), operand_dtype=jnp.bfloat16)"),
            ("mixed = any({\"t\", \"s\"} <= x or \"logit\" in x for x, _ in about)", "mixed = False"),
        ],
    ),
    (
        "kernels/_program.py",
        "kernels/test_hidden_rows.py",
        [("return jnp.where(origin < _LOST, jnp.finfo(jnp.float32).max, units)", "return units")],
    ),
    (
        "_problem/lookups.py",
        "kernels/test_lookups.py -k nothing_but",
        [("for v in wanted if not isinstance(v, Literal) and v not in known}", "for v in wanted if not isinstance(v, Literal)}")],
    ),
    (
        "_problem/lookups.py",
        "kernels/test_differences.py -k 'found or singular or narrow'",
        [
            ("if eqn.primitive is lax.sub_p and set(sides) == {\"t\", \"s\"}:", "if set(sides) == {\"t\", \"s\"}:"),
            ("if constant and sides[0] and not isinstance(eqn.invars[0], Literal):", "if constant and sides[0]:"),
            ("if reads and eqn.primitive in _SINGULAR and", "if False and"),
            ("self.run(given, [held(x, acc=acc) for x in self.consts], self.found[i])", "self.run(given, self.consts, self.found[i])"),
        ],
    ),
    (
        "_problem/differences.py",
        "kernels/test_differences.py -k 'matrix or count or mesh or mask'",
        [
            ("starts = rows * queries - columns * keys", "starts = rows * queries + columns * keys"),
            ("positions = problem.q_positions is None and problem.kv_positions is None", "positions = problem.q_positions is None"),
        ],
    ),
    (
        "_problem/lookups.py",
        "kernels/test_differences.py -k matrix",
        [("differences = differences + problem.q_shift", "pass")],
    ),
    (
        "strategies/_in_kernels.py",
        "strategies/test_supports.py -k 'kernel and (table or differences)'",
        [
            ("any(term.moves_positions or term.selects for", "any(term.selects for"),
            ("any(term.moves_positions or term.selects for", "any(term.moves_positions for"),
            ("strategy.reads_stored or strategy.shards_tokens()", "strategy.reads_stored"),
            ("strategy.reads_stored or strategy.shards_tokens()", "strategy.shards_tokens()"),
        ],
    ),
    (
        "kernels/tpu/_diagonals.py",
        "kernels/test_differences.py -k 'registers'",
        [
            ("padded(eqn.params[\"keys\"]) - (i + 1) * LANES", "padded(eqn.params[\"keys\"]) - LANES"),
            ("x if factor is None else x * factor", "x"),
            ("i = (keys - LANES - at.start + to.start) // LANES", "i = (keys - LANES + to.start) // LANES"),
            ("strip = strip[n:] + pltpu.roll(strip[:n], n, 1)", "strip = strip[n:] + strip[:n]"),
            ("pltpu.roll(strip, SUBLANES - n, 0) + pltpu.roll(strip, n, 1)", "strip + pltpu.roll(strip, n, 1)"),
        ],
    ),
    (
        "kernels/tpu/__init__.py",
        "kernels/test_tpu.py -k 'no_kernel or known or long'",
        [
            ("if eqn.primitive.name not in _OF_FUNCTIONS:", "if False:"),
            ("if aval.dtype not in known:", "if False:"),
        ],
    ),
    (
        "kernels/tpu/_lists.py",
        "kernels/test_tpu.py -k 'no_kernel or known or long'",
        [("if known is not None and layout.ring is None:", "if False:")],
    ),
]
