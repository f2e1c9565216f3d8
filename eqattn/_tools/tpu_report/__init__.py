"""`python -m eqattn tpu-report`: what the compiler of TPUs makes of the kernels, without a TPU.

`kernels` and `peers` say what is compiled, `chips` for what. A `child` process compiles it, and
leaves the compiler's schedule in files that `schedule` reads; `steps` finds the cycles of a step of
the grid in it, `whole` those of a whole kernel, and `rows` holds the figures. `cli` starts the
children and `report` shows what they found. Nothing here is imported by `import eqattn`.
"""
