"""Mutants of kernels that read and write features innermost."""
# fmt: off

FEATURES = "kernels/test_tpu_features.py"

MUTANTS = [
    (
        "kernels/tpu/_forward.py",
        FEATURES,
        [
            ("there, here = (turned[0].at[i] for i in range(2))", "there = here = turned[0].at[0]", "the values of the pair before are read before those of the pair take their place; a second buffer lets units overlap"),
            ("int(not plan.early or i > 0)", "1"),
            ("if main.held[i] and COL not in x.axes and turns(blocks[i]):", "if False:"),
        ],
    ),
    (
        "kernels/tpu/_backward.py",
        FEATURES,
        [
            ("last = into is None and i in stay", "last = False and i in stay"),
            ("return rows and turned.main.turned[n + i]", "return False"),
        ],
    ),
    (
        "kernels/tpu/_sum_result.py",
        FEATURES,
        [
            ("return (self.heads, *self.rows, rows // self.heads, features)", "return (*self.rows, self.heads, rows // self.heads, features)"),
            ("x = from_heads(x) if self.heads > 1 else x", "x = x.reshape(*x.shape[:-4], x.shape[-3], -1, x.shape[-1]) if self.heads > 1 else x"),
        ],
    ),
    (
        "kernels/tpu/_operands.py",
        FEATURES,
        [("return 1 if layout.block[1] // layout.group % 16 else layout.group", "return 1")],
    ),
    (
        "_sweep/tokens.py",
        FEATURES,
        [
            ("return jnp.swapaxes(x.reshape(*lead, heads, n // heads, features), -3, -4)", "return x.reshape(*lead[:-1], heads, lead[-1], n // heads, features)"),
        ],
    ),
    (
        "_problem/fold.py",
        FEATURES,
        [("if lowering.holds_operands_apart:", "if False:")],
    ),
]
