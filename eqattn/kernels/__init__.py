"""Pallas kernels, imported only where one is lowered."""
