"""Mutants of what cuDNN is given, and of how the GPU kernel cuts caches."""
# fmt: off

CUDNN = "kernels/test_cudnn.py"

MUTANTS = [
    (
        "kernels/gpu/_cudnn.py",
        CUDNN,
        [
            ("causal = found.causal or term.right == 0", "causal = found.causal"),
            ("left=min(bounds, default=None)", "left=max(bounds, default=None)"),
            ("if any(n % 2 for n in lengths):", "if False:"),
            ('fixed["local_window_size"] = mask.left, 0', 'fixed["local_window_size"] = mask.left + 1, 0'),
            ("if start is None or start.any():", "if start is not None and start.any():"),
            ("if known is not None and known.size and known.min() <= 0:", "if False:"),
            ("if mask.causal and queries > keys:", "if False:"),
            ("if bias.dtype != problem.query.dtype:", "if False:"),
        ],
    ),
    (
        "kernels/gpu/_stored_arrays.py",
        "kernels/test_gpu_ragged.py -k sizes",
        [("return self.heads * self.padded_of_head", "return rounded_up(self.rows, self.tile_r)")],
    ),
    (
        "kernels/gpu/_stored.py",
        "kernels/test_gpu_ragged.py -k sizes",
        [
            ("min(rounded_up(self.of_head, 8), TILE)", "TILE"),
        ],
    ),
    (
        "strategies/_support.py",
        CUDNN,
        [("if name in strategy.libraries:", "if True:")],
    ),
]
