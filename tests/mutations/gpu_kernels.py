"""Mutants of the kernels for NVIDIA GPUs: where tokens lie, and what is not finite. They need jax
0.12, as their tests do.
"""
# fmt: off

TOKENS = "kernels/test_gpu_tokens.py -k 'not grad'"
FINITE = "kernels/test_gpu.py -k not_finite"
MASKED = "kernels/test_gpu.py -k masked_reaches"
LEARNED = "kernels/test_gpu_scores.py -k 'learned or inlined'"
BIAS = "kernels/test_gpu_bias.py -k 'triton or kernels'"
WRITTEN = "kernels/test_gpu_scores.py -k 'write or powers'"
REFUSED = "kernels/test_gpu_scores.py -k 'no_kernel or body'"

MUTANTS = [
    (
        "_sweep/tokens.py",
        "sweep/test_tokens.py",
        [
            ("return lax.slice_in_dim(x, 0, self.count, axis=len(others))", "return x"),
            ("features, group, block = (n, n + 1, n + 2) if turned else (n + 2, n, n + 1)", "features, group, block = (n, n + 2, n + 1) if turned else (n + 2, n, n + 1)"),
            ("block = (features, -1) if turned else (-1, features)", "block = (-1, features)"),
        ],
    ),
    (
        "kernels/gpu/_matrices.py",
        TOKENS,
        [
            ("inside = heads < group", "inside = heads <= group"),
            ("inside = True if single else start < block", "inside = True"),
            ("whole = found.block % mosaic.WARPGROUP == 0", "whole = True"),
            ("whole = whole or found.block in (8, 16, 32)", "whole = True"),
            ("x = padded(x, 1, rounded_up(x.shape[1], _ROWS))", "pass"),
            ("short = self.width % 8 == 0 and self.width <= mosaic.WARPGROUP", "short = True"),
        ],
    ),
    (
        "kernels/gpu/_forward.py",
        FINITE,
        [
            ("total = total + jnp.where(x == -jnp.inf, 0.0, bad)", "total = total + bad"),
            ("            state = acc, den, top\n", ""),
        ],
    ),
    (
        "kernels/gpu/_forward.py",
        "kernels/test_gpu.py -k behind_a_block",
        [("return super().spreads or (self.table_axes is not None and uneven)", "return super().spreads")],
    ),
    (
        "kernels/gpu/_two_visits.py",
        FINITE,
        [
            ("mosaic.when(ft.reduce(jnp.add, found) != 0)(lambda: self.visit(rest, scratch))", "pass"),
            ("found = [check[i, lax.axis_index(\"program\")] for i in range(self.computing)]", "found = [check[0, lax.axis_index(\"program\")]]", "what is not finite reaches the rows of both warpgroups; those that share out the columns of long latents are looked at by test_warpgroups_do_not_race, which is slow"),
            ("if not self.spreads:", "if True:"),
        ],
    ),
    (
        "kernels/gpu/_pair_program.py",
        "kernels/test_gpu.py -k not_positive",
        [
            ("return jnp.maximum(jnp.abs(scale), least)", "return jnp.maximum(scale, least)"),
        ],
    ),
    (
        "kernels/gpu/_pair_program.py",
        "kernels/test_gpu_scores.py -k divided_by",
        [
            ("run.added = self.added, 1 / positive", "run.added = self.added, 1 + 0 * positive"),
            ("least = LEAST_SCALE if added else jnp.finfo(jnp.float32).tiny", "least = jnp.finfo(jnp.float32).tiny"),
        ],
    ),
    (
        "kernels/gpu/_operands.py",
        "kernels/test_gpu_tokens.py",
        [
            ("return tile * jnp.int32(TILE) + warpgroup * jnp.int32(WARPGROUP)", "return tile * jnp.int32(TILE)"),
        ],
    ),
    (
        "kernels/gpu/_lists.py",
        "kernels/test_gpu_order.py",
        [
            ("own = rank if order is None else order[rank]", "own = rank"),
            ("element = element + group * jnp.int32(together)", "pass"),
            ("if elements % n == 0)", "if True)"),
            ("(counts[table, rank, i] for i in (0, 1))", "(counts[table, places.at[places.side.own], i] for i in (0, 1))"),
            ("lambda at: others[table, rank, at]", "lambda at: others[table, places.at[places.side.own], at]"),
            ("full = count if max(plan.programs) == FULL else jnp.int32(0)", "full = jnp.int32(0)"),
        ],
    ),
    (
        "kernels/gpu/_plans.py",
        "kernels/test_gpu_order.py",
        [
            ("return [ranks, *(x[..., ranks, :].reshape", "return [ranks, *(x.reshape"),
            ("return [x.reshape(-1, *x.shape[-2:]) for x in lists(table, tuple(classes))[1:]]", "return listed(table, classes)[1:]"),
        ],
    ),
    (
        "kernels/gpu/_program.py",
        "kernels/test_gpu_scores.py -k 'divided_by_the_scale and cuda'",
        [
            ("xs = [self.times(x, factor, given) for x in eqn.invars]\n                return", "xs = [self.times(x, None, given) for x in eqn.invars]\n                return"),
        ],
    ),
    (
        "kernels/gpu/_program.py",
        "kernels/test_gpu_scores.py -k may_be_negative",
        [("isinstance(factor, float | np.floating) and factor > 0", "factor is not None")],
    ),
    (
        "kernels/gpu/_sum_program.py",
        "kernels/test_gpu_scores.py -k ignore_its_logit",
        [("if not any(eqn.primitive is dot_p for eqn in eqns):", "if False:")],
    ),
    (
        "kernels/gpu/_program.py",
        "kernels/test_gpu_scores.py -k predicate_may_be_known",
        [
            ("case = int(at.val) if isinstance(at, Literal) else case", "pass"),
            ("case = int(at.val)", "case = 1 - int(at.val)"),
        ],
    ),
    (
        "kernels/gpu/_program.py",
        LEARNED,
        [
            ("known[v] = known.get(v, facts) & facts", "known[v] = facts"),
            ("case = next((i for v, i in facts if v is at), None)", "case = None"),
            ("case = 0 if all(x is roots[0] for x in roots) else case", "pass"),
            ("x = self.times(eqn.invars[0], 2 * LOG2E, {})", "x = self.times(eqn.invars[0], LOG2E, {})"),
            ("factor / self.value(y).array", "1 / self.value(y).array"),
        ],
    ),
    (
        "kernels/gpu/_pair_program.py",
        "kernels/test_gpu_scores.py -k factor_behind",
        [
            ("if self._is_number(x) and self._is_odd(rest):", "if self._is_number(x):"),
        ],
    ),
    (
        "kernels/gpu/_operations.py",
        WRITTEN,
        [
            ("turned = (whole + (whole & 1)) & 2", "turned = whole & 2"),
            ("return jnp.where(whole > x, whole - 1, whole)", "return whole"),
            ("return power if y > 0 else 1 / power", "return power"),
            ("return 1 - 2 * inverse(1 + e)", "return 1 - inverse(1 + e)"),
            ("_HALF_PI = 1.5625, 0.00830078125, -4.4544551033807686e-06", "_HALF_PI = 1.5625, 0.00829634, 0.0"),
        ],
    ),
    (
        "kernels/gpu/_operations.py",
        REFUSED,
        [
            ("if aval.dtype not in _DTYPES and not is_mask:", "if False:"),
            ("if eqn.primitive is lax.rem_p and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating):", "if False:"),
        ],
    ),
    (
        "kernels/_program.py",
        REFUSED,
        [
            ('"jit pjit remat remat2".split()', '"jit pjit remat remat2 scan".split()'),
        ],
    ),
    (
        "kernels/gpu/_matrices.py",
        "kernels/test_gpu_tokens.py -k any_length",
        [
            ("first = jnp.int32(0) if single else at[self.axis] * jnp.int32(block)", "first = at[self.axis] * jnp.int32(block)"),
        ],
    ),
    (
        "kernels/gpu/_pair_gradients.py",
        BIAS,
        [
            ("return all(a in axes or self.layout.grid[a] == 1 for a in (ROW, COL))", "return all(a in axes for a in (ROW, COL))"),
            ("at |= indices(self.layout, self.rest, turn)", "pass"),
            ("step, turn = divided(divided(step, self.parts)[0], self.turns // self.parts)", "step, turn = divided(step, self.turns // self.parts)"),
            ("order = (*self.of_lists, ROW, COL, *self.chosen)", "order = (*self.of_lists, COL, ROW, *self.chosen)"),
            ("if shared or eqn.params[\"axes\"] != (1,) or len(_shape(x)) != 3:", "if True:"),
        ],
    ),
    (
        "kernels/gpu/_pair_sums.py",
        "kernels/test_gpu_bias.py -k 'cuda and groups'",
        [
            ("there = plan.visit.part(step) * 2 + self.warpgroup < plan.heads", "there = True"),
            ("both = lambda now=now: now + mosaic.load(other, \"pairs\")", "both = lambda now=now: now"),
        ],
    ),
    (
        "kernels/gpu/triton/_pair_sums.py",
        BIAS,
        [
            ("inside = inside & (row < queries.count) & (key < keys.count)", "pass"),
            ("head = plan.visit.part(step) * jnp.int32(sizes.rows)", "head = jnp.int32(0)"),
        ],
    ),
    (
        "kernels/gpu/_sums.py",
        "kernels/test_gpu_tokens.py -k large_tiles",
        [
            ("(head % large == 0 or large % head == 0)", "True"),
        ],
    ),
    (
        "kernels/gpu/_backward.py",
        MASKED,
        [
            ("first = program.cleaned_first - set(plan.own) if cleans else set()", "first = set()", "a selection by the mask follows, and rows that see such a number are NaN by their logsumexp"),
            ("self.plain, self.full = self.live * clean, self.full * clean", "self.plain = self.live"),
            ("mosaic.when(self.dirty > 0)(ft.partial(self.clean_own, own))", "pass", "a selection by the mask follows, and rows that see such a number are NaN by their logsumexp"),
        ],
    ),
]
