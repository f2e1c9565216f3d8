"""Mutants of the forward kernel for TPUs that visits two heads in a step."""
# fmt: off

HEADS = "kernels/test_tpu_abreast.py"

MUTANTS = [
    (
        "kernels/tpu/_forward.py",
        HEADS,
        [
            ("= [ref.at[head] for ref in scratch]", "= [ref.at[0] for ref in scratch]"),
            ("ref.at[head] if grid.abreast > 1 else ref", "ref.at[0] if grid.abreast > 1 else ref"),
            ("of_head = ft.partial(read, head=head)", "of_head = ft.partial(read, head=0)"),
            ("blocks = [read(x, ref, lag=1, head=head) for x, ref in given]", "blocks = [read(x, ref, lag=1) for x, ref in given]"),
            ("return 1 if layout.grid[HEAD] % heads else heads", "return heads"),
        ],
    ),
    (
        "kernels/tpu/_forward_step.py",
        HEADS,
        [
            ("[body.total() for body in bodies]", "[body.total() for body in bodies[:1]]"),
            ("        for body in bodies:\n            body.poison()", "        for body in bodies[:1]:\n            body.poison()"),
            ("            found[0] = look()\n", "            found[0] = jnp.int32(0)\n"),
            ("known = look if found is None else lambda: found[0]", "known = look if found is None else lambda: jnp.int32(0)"),
        ],
    ),
    (
        "kernels/tpu/_grid.py",
        HEADS,
        [
            ("at = self._beside(x.axes, at, head) if self.heads(x.axes) else at", "at = self._beside(x.axes, at, 0) if self.heads(x.axes) else at"),
            ("at = axes.index(HEAD) + 1", "at = axes.index(HEAD)", "all arrays are cut alike, so that other heads stand beside each other and each has its own numbers"),
            ("return lax.shift_right_logical(x, jnp.int32(size.bit_length() - 1)), x & (size - 1)", "return lax.shift_right_logical(x, jnp.int32(size.bit_length() - 1)), x & size"),
        ],
    ),
]
