"""Mutants of the kernels in Pallas Triton."""
# fmt: off

FINITE = "kernels/test_gpu_triton.py -k 'not_finite or masked_reaches'"
SIGN = "kernels/test_gpu_triton.py -k not_positive"
CHOICE = "kernels/test_gpu_triton.py -k 'choose or chooses'"
CARRY = "kernels/test_gpu_triton.py -k earlier_hops"

MUTANTS = [
    (
        "kernels/gpu/triton/_forward.py",
        FINITE,
        [
            ("state = acc, den + jnp.where(s == -jnp.inf, 0.0, bad).sum(1), top", "state = acc, den + bad.sum(1), top"),
            ("tile = jnp.where(fine, tile, jnp.zeros_like(tile))", "pass"),
            ("end = end if self.clean is None else end * self.clean", "pass"),
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
            ("end = end if self.dirty is None else end * (1 - self.dirty)", "pass"),
        ],
    ),
    (
        "kernels/gpu/__init__.py",
        CHOICE,
        [('return capability()[:2] in ("", "9.")', "return True")],
    ),
]
