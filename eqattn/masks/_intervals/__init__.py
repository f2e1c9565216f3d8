"""Interval interpretation of a mask's jaxpr, which finds the blocks that it empties or fills."""
