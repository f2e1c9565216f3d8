"""Mutants of the visit that finishes rows, in the caller's dtype."""
# fmt: off

ATTEND = "kernels/test_attend.py conformance/test_accuracy.py -k 'attend or kernels_within'"

MUTANTS = [
    (
        "_sweep/attend.py",
        ATTEND,
        [
            ("return derived and jnp.dtype(dtype).itemsize < jnp.dtype(acc).itemsize", "return False"),
            ("num, den = num * along(share), den * share + jnp.exp(sink[0] - origin)", "num, den = num * along(share), den + jnp.exp(sink[0] - origin)"),
            ("        top = origin\n", ""),
            ("c = c - from_heads(sums[..., None])[..., 0]", "c = c"),
            ("(found[last],) = back(at.share()[0] * c)", "(found[last],) = back(c)"),
            ("out = dnum - at.output * dlse[..., None]", "out = dnum"),
            ("[jnp.exp(x - finite_origin(self.lse)) for x in self.sink]", "[jnp.exp(x - safe_max(self.lse)) for x in self.sink]"),
            ("first = (at.table is not None) + len(at.operands) + 1", "first = len(at.operands) + 1"),
        ],
    ),
    (
        "_sweep/fold.py",
        ATTEND,
        [
            ("p = jnp.exp(s - finite_origin(m)[None])", "p = jnp.exp(s - safe_max(m)[None])"),
        ],
    ),
    (
        "_sweep/sweep.py",
        ATTEND,
        [
            ("dtypes=[operands[i].aval.dtype for i in group],", "dtypes=(),"),
        ],
    ),
    (
        "kernels/tpu/_sum_result.py",
        "conformance/test_accuracy.py -k kernels_within",
        [("return not self.rows or self.dtype != self.aval.dtype", "return not self.rows")],
    ),
    (
        "kernels/tpu/_backward.py",
        "conformance/test_accuracy.py -k kernels_within",
        [
            ("begin, end = at == 0, at == pl.num_programs(len(self.lead)) - 1", "begin, end = at == 0, at == 0"),
        ],
    ),
]
