"""Kernels for NVIDIA GPUs: what both compilers share, `hopper/` by Mosaic GPU, `triton/` by
Pallas Triton, and cuDNN's.
"""
