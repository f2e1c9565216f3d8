"""`python tests/measure gpu-run`: the kernels for NVIDIA GPUs on such a GPU, in under ten minutes.

A separate process runs some of the conformance matrix on the device. Then it times calls, their
gradients and steps of decoding, side by side with other libraries. It can be rehearsed without a
GPU.
"""
