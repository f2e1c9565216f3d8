"""Mutants of kernels that read and write features innermost."""
# fmt: off

FEATURES = "kernels/test_tpu_features.py"

MUTANTS = [
    (
        "kernels/tpu/_forward.py",
        FEATURES,
        [
            ("there, here = (turned[0].at[i] for i in range(2))", "there = here = turned[0].at[0]"),
            ("int(not plan.early or i > 0)", "1"),
            ("if main.held[i] and COL not in x.axes and turns(blocks[i]):", "if False:"),
        ],
    ),
    (
        "kernels/tpu/_backward.py",
        FEATURES,
        [
            ("last = i in stay and results[i].apart", "last = False and results[i].apart"),
            ("both = turned.main.turned[n + i]", "both = False"),
        ],
    ),
    (
        "_problem/fold.py",
        FEATURES,
        [("if lowering.holds_operands_apart:", "if False:")],
    ),
]
