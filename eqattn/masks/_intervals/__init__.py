"""Which blocks a mask empties or fills, by interval interpretation of its jaxpr."""
