"""Mutants of the kernels: their lists of pairs, their programs and their steps."""
# fmt: off

LISTS = "kernels/test_tpu_lists.py"
VALUES = "kernels/test_tpu_values.py"

MUTANTS = [
    (
        "kernels/tpu/_work_list.py",
        LISTS,
        [
            ("chosen = (table != EMPTY) | (none &", "chosen = (table != EMPTY) | (~none &"),
            ("first = ~past & (group != xp.concatenate([edge, group[..., :-1]], -1))", "first = ~past"),
            ("last = ~past & (group != xp.concatenate([group[..., 1:], edge], -1))", "last = ~past"),
            ("here == end - 1, LAST, 0)", "here == end, LAST, 0)"),
            ("pairs = jnp.where(here < end, pairs | flags, pairs & ~15)", "pairs = pairs | flags"),
            ("column += row // apart * columns", "pass"),
            ("end = jnp.minimum(begin + size, length)", "end = begin + size"),
            ("return (pair >> 2) & 3", "return (pair >> 2) & 1"),
        ],
    ),
    (
        "kernels/tpu/_windows.py",
        LISTS,
        [
            ("return inside if 2 * size == keys * layout.corner else []", "return inside"),
            ("2 * a.start >= keys and b.stop <= layout.corner", "2 * a.stop > keys and b.stop <= layout.corner", "with a part that straddles the middle of the keys the sizes disagree, and there is no corner either way"),
            ("2 * a.start >= keys and b.stop <= layout.corner", "2 * a.start >= keys and b.start < layout.corner", "with a part that straddles the end of the corner the sizes disagree, and there is no corner either way"),
            ("m if n % m == 0 else n", "m"),
            ("parts += [Part(x, to, kind) for x in cut(start, stop, most)]", "parts += [Part(x, to, kind or FULL) for x in cut(start, stop, most)]"),
            ("for to, kinds in zip(cut(0, rows, width), known):", "for to, kinds in zip(cut(0, rows, width), known[::-1]):"),
            ("[kind for kind, _ in layout.parts] == [CORNER]", "CORNER in dict(layout.parts)"),
            ("end = x.to.start // width, x.at.stop", "end = x.to.start // width, x.at.start + 1"),
        ],
    ),
    (
        "_problem/block_classes.py",
        LISTS,
        [
            ("    if blocking.keys % STEP:", "    if False:"),
            ("* blocking.group))", "))"),
            ("or (table == EMPTY).all(-1).any()", ""),
            ("((each == EMPTY) | (each == -1)).all(0)", "((each == EMPTY) | (each == -1)).any(0)"),
            ("np.where(empty, EMPTY, np.where(full, FULL, PARTIAL))", "np.where(full, FULL, PARTIAL)"),
            ("[(0, 0)] * 3 + pads[3:], constant_values=EMPTY)", "[(0, 0)] * 3 + pads[3:], constant_values=FULL)"),
            ("    if blocking.fixed:", "    if False:"),
            ("if sides[0] > sides[1]:", "if False:", "only speed: other forms of the step"),
        ],
    ),
    (
        "kernels/tpu/_forward_step.py",
        LISTS,
        [
            ("jnp.full((size_of(at), size_of(to)), -jnp.inf, jnp.float32)", "jnp.full((size_of(at), size_of(to)), 0.0, jnp.float32)"),
            ("change_of_origin(now, was, jnp.exp2)", "change_of_origin(now, was)"),
            ("if at.start == 0:\n                self.most", "if False:\n                self.most"),
            ("        if not alone:\n            partial(hidden, beside(layout, hidden), some)\n            return\n", ""),
            ("self.most[:, to] = highest if first else jnp.maximum(self.most[:, to], highest)", "self.most[:, to] = highest"),
            ("(old if begun else old * scale[:, x.to]) + term", "old * scale[:, x.to] + term"),
            ("begun = x.at.start != begins[x.to.start]", "begun = x.at.start != 0"),
            ("mixed = not alone and corner != some_hidden", "mixed = skip and not alone"),
        ],
    ),
    (
        "kernels/tpu/_program.py",
        VALUES,
        [
            ("return jnp.exp2(self.times(eqn.invars[0], LOG2E))", "return jnp.exp2(self.value(eqn.invars[0]))"),
            ("return factor * (x + y)", "return factor * x + y"),
            ("jnp.where(jnp.abs(kept) < jnp.inf, jnp.clip(x, *RANGE), x)", "x"),
        ],
    ),
    (
        "kernels/tpu/_range.py",
        VALUES,
        [("np.float32(np.clip(float(x) * factor, *RANGE))", "np.float32(float(x) * factor)")],
    ),
    (
        "kernels/tpu/__init__.py",
        "kernels/test_tpu.py -k 'raise or select or kernel or general or lower'",
        [
            ("too_long = not has_turns(layout) and pairs > MOST_PAIRS", "too_long = False"),
            ("if self.required:", "if False:"),
            ("if reason := self._why_not(ctx, layout, visits):", "if reason := 'some reason':"),
        ],
    ),
    (
        "kernels/tpu/_lists.py",
        "kernels/test_rows_in_turns.py",
        [
            ("return apart[0] if apart else ROW", "return apart[0] if apart else None"),
            ("of_one = dataclasses.replace(of_one, known=None, parts=(), tokens=tokens)", "of_one = dataclasses.replace(of_one, parts=(), tokens=tokens)"),
            ("args = [jnp.full(layout.grid[ROW:], default_class, jnp.int8), *args]", "args = [jnp.full(layout.grid[ROW:], 1, jnp.int8), *args]"),
            ("return lax.slice_in_dim(y, 0, whole, axis=n)", "return y"),
            ("return jnp.pad(x, [(0, (count * size - whole) * (i == at)) for i in range(jnp.ndim(x))])", "return x"),
        ],
    ),
    (
        "kernels/tpu/_lists.py",
        "kernels/test_tpu.py -k scalar",
        [("return not layout.ragged and layout.ring is None", "return layout.ring is None")],
    ),
]
