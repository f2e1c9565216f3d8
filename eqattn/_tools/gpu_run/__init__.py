"""`python -m eqattn gpu-run`: the kernels for NVIDIA GPUs on such a GPU, in under ten minutes.

A process of its own runs some of the conformance matrix on the device, and then times calls, their
gradients and steps of decoding, side by side with other libraries. No GPU is needed to rehearse it.
"""
