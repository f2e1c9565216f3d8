"""Mutants of the kernels in Pallas Triton."""
# fmt: off

FINITE = "kernels/test_gpu_triton.py -k 'not_finite or masked_reaches'"
CLEANED = "kernels/test_cleaned_caches.py -k triton"
SIGN = "kernels/test_gpu_triton.py -k not_positive"
CHOICE = "kernels/test_gpu_triton.py -k 'choose or chooses'"
CARRY = "kernels/test_gpu_triton.py -k earlier_hops"

MUTANTS = [
    (
        "kernels/gpu/triton/_forward.py",
        FINITE,
        [
            ("state = acc, den + poison, top", "pass"),
            ("self.check[self.program] = (acc * 0).sum()", "self.check[self.program] = jnp.float32(0)"),
            ("        if self.again:\n            tile,", "        if False:\n            tile,"),
        ],
    ),
    (
        "kernels/gpu/triton/_fold.py",
        FINITE,
        [("in_place = {1 + len(inputs) + i: i for i in range(len(out))}", "in_place = {}")],
    ),
    (
        "kernels/gpu/triton/_rows.py",
        CLEANED,
        [
            ("return value, scale, jnp.where(s == -jnp.inf, 0.0, bad).sum(1)", "return value, scale, bad.sum(1)"),
            ("bad, value = nan(value).sum(1), finite(value)", "bad = nan(value).sum(1)"),
            ("bad, scale = bad + nan(scale), finite(scale)", "scale = finite(scale)"),
            ("bad, scale = bad + nan(scale), finite(scale)", "bad = bad + nan(scale)"),
        ],
    ),
    (
        "kernels/gpu/triton/_decode.py",
        CLEANED,
        [
            ("state = triton.unless_finite(state[:1], again, state)", "pass"),
            ("return lax.fori_loop(self.first, self.last, step, empty)", "return lax.fori_loop(self.first, self.last, step, state)"),
        ],
    ),
    (
        "kernels/gpu/triton/_forward.py",
        SIGN,
        [("self.queries = self.queries * other.astype(plan.dtype)", "pass")],
    ),
    (
        "kernels/gpu/triton/_forward.py",
        CARRY,
        [("return acc, den, top * LOG2E", "return acc, den, top")],
    ),
    (
        "kernels/gpu/triton/_backward.py",
        FINITE,
        [
            ("tile = finite(tile) if gradient.matrix in last else tile", "pass"),
            ("sums = triton.unless_finite(sums, again, sums)", "pass"),
        ],
    ),
    (
        "kernels/gpu/__init__.py",
        CHOICE,
        [('return capability()[:2] in ("", "9.")', "return True")],
    ),
]
