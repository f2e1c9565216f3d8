"""Mutants of the backward's kernel for wide matrix units, and of the pipeline of decoding."""
# fmt: off

BACKWARD = "kernels/test_tpu_backward.py"
ROWS = "kernels/test_tpu_ragged.py"

MUTANTS = [
    (
        "kernels/tpu/_backward_step.py",
        BACKWARD,
        [
            ("ref[...] = here.block(v).astype(dtype).T", "ref[...] = here.block(v).astype(dtype).T * 0"),
            ("turned[v, dtype] = ref = refs[n % 2]", "turned[v, dtype] = ref = refs[0]", "the sums of the window before have read the one buffer before this window writes it; a second one lets units overlap"),
            ("linear |= eqn.primitive is lax.mul_p and sum(of_blocks) == 1", "linear |= eqn.primitive is lax.mul_p"),
            ("linear |= eqn.primitive in _ADD and all(of_blocks)", "linear |= eqn.primitive in _ADD"),
            ("linear = all(b or self._zero(x) for b, x in zip(of_blocks[1:], eqn.invars[1:]))", "linear = True"),
            ("parts = [x for x in parts if x not in skip]", "parts = [x for x in parts if x in skip] or parts"),
            ("left = run.turned_part(other, axis == 0, dtype, summed)", "left = run.turned_part(other, axis == 0, dtype, slice(0, size_of(summed)))"),
        ],
    ),
    (
        "kernels/tpu/_turned.py",
        BACKWARD,
        [
            ("key = \"part\", v, dtype, part.start, part.stop", "key = \"part\", v, dtype"),
            ("return product_of(left[rows], right[:, keys], (1, 0), eqn.params[\"precision\"])", "return product_of(left[: size_of(rows)], right[:, keys], (1, 0), eqn.params[\"precision\"])"),
        ],
    ),
    (
        "kernels/tpu/_turned.py",
        "kernels/test_tpu_backward.py -k number_of_each",
        [("if x.size == 1:  # also", "if x.ndim == 0:  # also")],
    ),
    (
        "kernels/tpu/_sides.py",
        "kernels/test_tpu_values.py kernels/test_tpu_backward.py kernels/test_tpu_abreast.py",
        [
            ("columns(x, part, other.stop - other.start) if upright else x[:, part]", "columns(x, part, other.stop - other.start) if upright else x[:, : part.stop - part.start]"),
            ("jnp.concatenate([x[part]] * (width // LANES), 1)", "jnp.concatenate([x[: part.stop - part.start]] * (width // LANES), 1)"),
            ("return n * _BOUNDS[comparison][0] >= 0", "return True"),
            ("return saturate(a, np.int32(limit + n)) - np.int32(n)", "return a - np.int32(n)"),
        ],
    ),
    (
        "kernels/tpu/_decode.py",
        ROWS,
        [
            ("both = logits.at[own], logits.at[1 - own]", "both = logits.at[own], logits.at[own]"),
            ("@pl.when((before & FIRST) != 0)", "@pl.when((pair & FIRST) != 0)"),
            ("@pl.when((before & LAST) != 0)", "@pl.when((pair & LAST) != 0)"),
            ("now = jnp.maximum(was, most[...])", "now = jnp.maximum(was, 0 * most[...])"),
        ],
    ),
]
