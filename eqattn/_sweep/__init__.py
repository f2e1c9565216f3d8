"""The primitives that visit pairs of blocks, closed under differentiation."""
