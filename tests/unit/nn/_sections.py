"""The definition of rotary positions of several axes, in float64 NumPy."""

import numpy as np


def turned_by_axes(
    x, positions, sections, *, axial=False, interleaved=False, theta=1e4, frequencies=None
):
    """Heads `[..., t, h, d]` after the turns of their pairs, at positions `[..., t, axes]`.

    Pair `j` of the section of axis `i` turns by the position on that axis. Without `axial` the
    frequency is `theta^(-2p/d)`, where `p` counts the pairs of all sections. With it, it is
    `theta^(-2j/d_i)`, where `d_i = 2 sections[i]` are the features of the section.
    """
    x, positions = np.asarray(x, np.float64), np.asarray(positions, np.float64)
    pairs, out, p = sum(sections), x.copy(), 0
    for axis, size in enumerate(sections):
        for j in range(size):
            speed = float(theta) ** (-2 * j / (2 * size) if axial else -2 * p / (2 * pairs))
            if frequencies is not None:
                speed = frequencies[p]
            angle = (positions[..., axis] * speed)[..., None]
            a, b = (2 * p, 2 * p + 1) if interleaved else (p, p + pairs)
            out[..., a] = np.cos(angle) * x[..., a] - np.sin(angle) * x[..., b]
            out[..., b] = np.sin(angle) * x[..., a] + np.cos(angle) * x[..., b]
            p += 1
    return out
