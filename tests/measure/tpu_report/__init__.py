"""`python tests/measure tpu-report` shows what the compiler of TPUs makes of kernels, without a TPU.

`kernels` and `peers` say what is compiled, and `chips` says for what. A `child` process compiles
it, and leaves the compiler's schedule in files that `schedule` reads. `steps` finds the cycles of a
step of the grid in it, `whole` those of a whole kernel, and `rows` holds the figures. `cli` starts
the children, and `report` shows what they found.
"""
