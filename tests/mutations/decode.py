"""Mutants of what decoding on TPUs folds, and of the copies that its kernel makes."""
# fmt: off

FOLDED = "kernels/test_tpu_decode.py"
COPIED = "kernels/test_tpu_ragged.py -k 'caches or races or share'"

MUTANTS = [
    (
        "kernels/tpu/_decode_program.py",
        FOLDED,
        [
            ("return self.rows if SUBLANES % share or self.rows % SUBLANES else SUBLANES", "return SUBLANES"),
            ("own = row // (self.rows // self.groups) == column % self.groups", "own = row // (self.rows // self.groups) == (column + 1) % self.groups"),
            ("return jnp.concatenate([jnp.where(mine, x, other) for mine in masks]) if masks else x", "return jnp.concatenate([x for mine in masks]) if masks else x"),
            ("period = math.lcm(LANES, self.groups)", "period = LANES"),
            ("return ft.reduce(op, [x[:, i : i + period] for i in range(0, x.shape[1], period)])", "return x[:, :period]"),
            ("return self.folded.spread(x, self.part.stop - self.part.start)", "return self.folded.spread(x[:1] + 0 * x, self.part.stop - self.part.start)"),
        ],
    ),
    (
        "kernels/tpu/_decode_copies.py",
        COPIED,
        [
            ("start(1 - here, self.lag - 1)", "start(1 - here, self.lag)"),
            ("pl.when(step == 0)(lambda: start(here, self.lag))", "pl.when(step == 0)(lambda: start(here, self.lag - 1))"),
            ("return lambda: x.read(buffer.at[here, n])", "return lambda: x.read(buffer.at[1 - here, n])"),
        ],
    ),
    (
        "kernels/tpu/_decode.py",
        FOLDED,
        [
            ("add(totals, ys, finite)", "add(totals, ys, True)"),
            ("p = jnp.where(bad, jnp.nan, jnp.exp(s - origins))", "p = jnp.exp(s - origins)"),
        ],
    ),
]
