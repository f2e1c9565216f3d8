"""Mutants of what masks and scores look up outside of kernels."""
# fmt: off

LOOKUPS = "kernels/test_lookups.py strategies/test_supports.py -k 'lookup or found or kernel'"

MUTANTS = [
    (
        "_problem/lookups.py",
        LOOKUPS,
        [
            ("None if a is None or {\"t\", \"s\"} <= set(a) else set(a)", "set(a or ())"),
            ("within = None if within is not None and {\"t\", \"s\"} <= within else within", "pass"),
            ("looked = eqn.primitive not in _CHEAP or any(x[1] for x in xs)", "looked = eqn.primitive not in _CHEAP"),
            ("if not found or any(v.aval.shape != () for v in found):", "if not found:"),
            ("\"b\", \"bh\", \"bt\", \"bs\", *[o.axes", "\"b\", \"h\", \"bt\", \"bs\", *[o.axes"),
            ("lead = () if shape[0] == 1 else problem.batch_shape", "lead = () if shape[0] == 1 else (shape[0],)"),
            ("found |= {v: about[v] for v in jaxpr.outvars if not isinstance(v, Literal)}", "pass"),
        ],
    ),
    (
        "_problem/lookups.py",
        "kernels/test_lookups.py -k nothing_but",
        [("for v in wanted if not isinstance(v, Literal) and v not in known}", "for v in wanted if not isinstance(v, Literal)}")],
    ),
    (
        "kernels/tpu/__init__.py",
        "kernels/test_tpu.py -k 'no_kernel or known or long'",
        [
            ("if calls(eqn) is None and eqn.primitive.name not in _OF_FUNCTIONS:", "if False:"),
            ("if aval.dtype not in (jnp.float32, jnp.int32, jnp.bool_):", "if False:"),
            ("if layout.known is None or layout.ring is not None:", "if True:"),
        ],
    ),
]
