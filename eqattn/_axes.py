"""The axes of the grid that a problem is cut into, from the right: vmap adds some on the left."""

BATCH, HEAD, ROW, COL = -4, -3, -2, -1
