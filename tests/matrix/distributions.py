"""The four input distributions on which accuracy is judged."""

import numpy as np


DISTRIBUTIONS = ("normal", "logits64", "outlier_keys", "v_mean_10")


def draw(name: str, b: int, t: int, s: int, h: int, kv: int, d: int, seed: int = 0):
    """`q [b,t,h,d]`, `k [b,s,kv,d]`, `v [b,s,kv,d]`, float64, and the scale 1/sqrt(d)."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((b, n, heads, d)) for n, heads in ((t, h), (s, kv), (s, kv)))
    if name == "logits64":
        q, k = 8 * q, 8 * k
    elif name == "outlier_keys":
        k[:, rng.integers(0, max(s, 1), max(s // 16, 1))] *= 20
    elif name == "v_mean_10":
        v = v + 10
    return q, k, v, d**-0.5
