"""Mutants of what kernels for NVIDIA GPUs read by the difference of positions."""
# fmt: off

T5 = "kernels/test_gpu_differences.py -k 't5 or padding'"
FEW = "kernels/test_gpu_differences.py -k 'pair or refused'"
CASES = "kernels/test_gpu_differences.py -k 't5 and triton'"

MUTANTS = [
    (
        "kernels/gpu/_diagonals.py",
        T5,
        [
            ("return begin + (self.numbers - 1) - i + other", "return begin + (self.numbers - 1) - i"),
            ("return begin + i - own", "return begin + i"),
            ("of = of + head if self.rows > 1 else of", "pass"),
            ("rows = rows - head * self.queries", "pass"),
            ("return len(at) == 1 and (self.heads == 1 or self.queries % tile == 0)", "return len(at) == 1"),
            ("x = x[..., ::-1] if side is ROWS else x", "pass"),
        ],
    ),
    (
        "kernels/gpu/triton/_rows.py",
        CASES,
        [
            ("places + (places & (TOGETHER - 1)) * (n - 1)", "places + (places & (TOGETHER - 1)) * n"),
            ("whole[i : i + n] for i in range(TOGETHER)", "whole[:n] for i in range(TOGETHER)"),
        ],
    ),
    (
        "kernels/gpu/_lowering.py",
        FEW,
        [("    repeats_diagonals = True\n", "")],
    ),
    (
        "_sweep/lowering.py",
        FEW,
        [("needs_windows: ClassVar[bool] = False", "needs_windows: ClassVar[bool] = True")],
    ),
]
