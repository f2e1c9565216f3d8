"""Mutants of the visits of blocks, around rings too, and of what a ring is planned to do."""
# fmt: off

SUMS = "sweep/test_rotation.py"
FOLDS = (
    "sweep/test_transforms.py scores/test_dropout.py"
    " -k 'test_transform and (value or vjp) or logsumexp_and or value_shows or extreme_rates'"
)
CORNERS = "conformance/test_corners.py -k 'never_read or of_the_scale or nonfinite'"

MUTANTS = [
    (
        "_ring/layout.py",
        "ring/test_layouts_and_plans.py",
        [
            ("np.stack([np.arange(n), 2 * n - 1 - np.arange(n)], 1)", "np.stack([np.arange(n), n + np.arange(n)], 1)"),
            ("np.argsort(self.chunks(as_size(n, \"n\")).reshape(-1))", "self.chunks(as_size(n, \"n\")).reshape(-1)"),
            ("axis %= x.ndim", "pass"),
            ("if tokens % (n * self.parts):", "if tokens % n:"),
            ("return tokens // (n * self.parts)", "return tokens // n"),
            ("path[1::2] = path[1::2][:, :, ::-1] if path.ndim > 2 else path[1::2, ::-1]", "pass"),
            ("[row[::-1] if i % 2 else row for i, row in enumerate(path)]", "list(path)"),
            ("[row[:0:-1] if i % 2 else row[1:] for i, row in enumerate(path)]", "[row[1:] for row in path]"),
            ("if path.shape[0] % 2:\n        path = path.T", "pass"),
            ("np.concatenate([*snake, path[::-1, 0]])", "np.concatenate([*snake, path[:, 0]])"),
            ("if as_size(n, \"n\", -REACH) < 1:", "if False:"),
        ],
    ),
    (
        "_ring/plan.py",
        "ring/test_layouts_and_plans.py",
        [
            ("value_dim = head_dim if value_dim is None else as_size(value_dim, \"value_dim\")", "value_dim = head_dim"),
            ("block**2 * (head_dim + value_dim)", "block**2 * (head_dim + head_dim)"),
            ("columns = tokens * kv_heads * (head_dim + value_dim)", "columns = tokens * kv_heads * 2 * head_dim"),
            ("columns = tokens * kv_heads * (head_dim + value_dim)", "columns = tokens * heads * (head_dim + value_dim)"),
            ("// (varied * group)", "// varied"),
            ("own = batch * (tokens // (devices * group))", "own = batch * (tokens // devices)"),
            ("tokens * heads * (value_dim + 1) * wide", "tokens * heads * value_dim * wide"),
            ("* (group - 1) // group", ""),
            ("(ahead + behind) * keys,", "ahead * keys,"),
            ("(keys + gradients),", "gradients,"),
            ("shifts = (*range(ahead + 1), *range(-1, -behind - 1, -1))", "shifts = (*range(ahead + 1), *range(1, behind + 1))"),
            ("key=lambda a: (a + behind(a), behind(a))", "key=lambda a: (-a, behind(a))"),
            ("live[np.arange(n), (np.arange(n) - s) % n].any()", "live[np.arange(n), (np.arange(n) + s) % n].any()"),
            ("max((n - s for s in shifts if s > ahead), default=0)", "max((n - s for s in shifts if s > ahead + 1), default=0)"),
            ("return blocks[chunks[:, :, None, None], chunks[None, None]].sum((1, 3))", "return blocks[chunks[:, :1, None, None], chunks[None, None]].sum((1, 3))"),
            ("return float(work.max() / work.mean())", "return float(work.max() / np.median(work))"),
            ("flops.max(1).sum() / flops.sum(0).mean()", "flops.max(1).sum() / flops.sum(0).max()"),
            ("return _balance(np.asarray(self.flops, float).sum(0))", "return _balance(np.asarray(self.flops, float).max(0))"),
            ("tokens = -(-tokens // (devices * group)) * devices * group", "pass"),
            ("heads, math.lcm(kv_heads, group)", "heads, kv_heads"),
        ],
    ),
    (
        "_ring/plan.py",
        "ring/test_layouts_and_plans.py -k reach",
        [
            ("if any(x is not None for x in explicit):", "if False:"),
            ("block_ends(t, chunks, problem.q_start, pieces)", "block_ends(t, chunks, 0, pieces)"),
        ],
    ),
    (
        "_sweep/rotation.py",
        "sweep/test_rotation.py -k travel_to",
        [
            ("to = [(i, (i + by) % self.size) for i in range(self.size)]", "to = [(i, (i - by) % self.size) for i in range(self.size)]"),
        ],
    ),
    (
        "_sweep/rotation.py",
        SUMS,
        [
            ("total = [x + y for x, y in zip(arrived, total)]", "pass"),
            ("total = [x + y for x, y in zip(total, more)]", "total = more"),
            ("return ring.move(total, -step * length), state", "return total, state"),
            ("arrived = total if total is None else ring.move(total, step)", "arrived = total"),
            ("ahead = columns if last else ring.move(columns, step)", "ahead = columns"),
            ("if length > first and (ring.unroll or length == first + 1):", "if length > first and length == first + 1:"),
            ("if length > first and (ring.unroll or length == first + 1):", "if length > first:"),
            ("((1, ring.ahead), (-1, ring.behind)) if n]", "((1, ring.ahead),) if n]"),
            ("departing = [ring.move(home, step) for step, _ in walks]", "departing = [home for step, _ in walks]"),
            ("half = layout.grid[ROW] // 2 if returns and walks else 0", "half = 0", "only when the visits run differs"),
            ("inside = (rows.start <= row) & (row < rows.stop)", "inside = (rows.start <= row) & (row <= rows.stop)"),
            ("for h in range(first, length):", "for h in range(first, length - 1):"),
            ("if first == 2 and length > 1:", "if False:"),
        ],
    ),
    (
        "_sweep/gathering.py",
        SUMS,
        [
            ("for axis in range(-self.rank - 1, -len(layout.grid) - 1, -1):", "for axis in range(-self.rank - 1, -len(layout.grid), -1):"),
            ("fn, table_axes = jax.vmap(fn, mapped), (axis, *table_axes)", "fn, table_axes = jax.vmap(fn, mapped), (*table_axes, axis)"),
        ],
    ),
    (
        "_sweep/sum_step.py",
        SUMS,
        [
            ("return [y if axis in a else y.sum(0) for y, a in zip(ys, out_axes)]", "return [y if axis in a else y[0] for y, a in zip(ys, out_axes)]"),
            ("return ys if accs is None else [a + y for a, y in zip(accs, ys)]", "return ys"),
        ],
    ),
    (
        "_sweep/sweep.py",
        SUMS,
        [
            ("def with_consts(*xs, j=j, mine=slice(start, stop)):", "def with_consts(*xs, j=j, mine=slice(n, n + len(j.consts))):"),
            ("reused = layout.ring is None and first in layout.batch", "reused = first in layout.batch"),
            ("first in layout.batch and layout.grid[0] == 1", "first in layout.batch and False", "a batch axis of one beside the new one changes only the layout of what XLA copies"),
            ("active = [i for i, t in enumerate(tangents) if not is_zero(t)]\n    n = len", "active = [i for i, t in enumerate(tangents) if not is_zero(t)][:1]\n    n = len"),
            ("groups = [of_columns, [i for i in linear if i not in of_columns]]", "groups = [of_columns]"),
            ("if jaxpr.out_avals[0].ndim > 2 else (ROW, COL)", "if False else (ROW, COL)"),
        ],
    ),
    (
        "_sweep/sweep.py",
        "sweep/test_sweep.py -k 'narrow_operands or all_outputs or of_one'",
        [
            ("outs = [jnp.expand_dims(x, 1) if one else x for x, one in zip(outs, of_one)]", "pass"),
            ("active = [i for i, ct in enumerate(cts) if not is_zero(ct)]", "active = [i for i, ct in enumerate(cts) if not is_zero(ct)][-1:]"),
            ("return accumulation_dtype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype", "return x.dtype"),
        ],
    ),
    (
        "_sweep/gathering.py",
        "sweep/test_sweep.py -k some_operands",
        [
            ("reads=tuple(kept.index(i) for i in self.reads)", "reads=self.reads"),
        ],
    ),
    (
        "_sweep/grid.py",
        "sweep/test_sweep.py -k some_operands",
        [
            ("in_axes = tuple(self.in_axes[i] for i in kept)", "in_axes = self.in_axes[: len(kept)]"),
        ],
    ),
    (
        "_sweep/loops.py",
        "sweep/test_memory.py -k copies",
        [("opaque = layout.uniform or (several and any(map(moves, axes)))", "opaque = layout.uniform")],
    ),
    (
        "_misc/__init__.py",
        "problem/test_folded_constants.py",
        [("return x if at_most(x.size, 2**14) else lax.optimization_barrier(x)", "return x")],
    ),
    (
        "_sweep/loops.py",
        "problem/test_folded_constants.py",
        [("table, n = unfolded(table), jnp.int32(table.shape[-1])", "n = jnp.int32(table.shape[-1])")],
    ),
    (
        "masks/_selected.py",
        "problem/test_folded_constants.py",
        [("jnp.sort(unfolded(jnp.where(rows < 0, none, rows)))", "jnp.sort(jnp.where(rows < 0, none, rows))")],
    ),
    (
        "masks/_intervals/classify.py",
        "problem/test_folded_constants.py",
        [("return unfolded(x).astype(dtype)", "return x.astype(dtype)")],
    ),
    (
        "_sweep/loops.py",
        SUMS,
        [
            ("[jnp.sum(table >= c, -1, dtype=jnp.int32, keepdims=True) for c in classes]", "[jnp.sum(table > c, -1, dtype=jnp.int32, keepdims=True) for c in classes]"),
            ("(np.int32(CORNER) - table.astype(jnp.int32))", "table.astype(jnp.int32)"),
            ("jnp.where(least == FULL, FULL, jnp.where(most == EMPTY, EMPTY, PARTIAL))", "jnp.where(most == EMPTY, EMPTY, FULL)"),
            ("lo = hi\n        local = finish", "lo = 0\n        local = finish"),
            ("accumulators = [x if old is None else old for x, old in zip(accumulators, into)]", "pass"),
            ("if isinstance(lo, int) and isinstance(hi, int) and hi - lo == 1:", "if False:", "a loop of one turn is that turn"),
        ],
    ),
    (
        "_sweep/grid.py",
        SUMS,
        [
            ("devices = 1 if self.ring is None or not {ROW, COL} <= set(axes) else self.ring.size", "devices = 1", "no output of a ring keeps rows and columns but a bias per pair, which the oracle of rings has"),
            ("start = [jnp.int32(at.get(a, 0)) for a in axes]", "start = [jnp.int32(at.get(a, 0) * 0) for a in axes]"),
        ],
    ),
    (
        "_sweep/lowering.py",
        "sweep/test_sweep.py -k visits",
        [
            ("return compiles_for_cpu(ctx) and not small and not partitioned_automatically(ctx)", "return False"),
        ],
    ),
    (
        "_sweep/products.py",
        "sweep/test_products.py -k '64 or multiplier or narrow_products or few_numbers'",
        [
            ("preferred_element_type=out)", "preferred_element_type=a.dtype)"),
            ("a, b = a.astype(operand_dtype), b.astype(operand_dtype)", "pass"),
            ("return lax.reduce_precision(x, exponent, info.nmant)", "return x"),
            ("operand_dtype, precision = None, lax.Precision.HIGHEST", "operand_dtype = None"),
            ("if operand_dtype is not None and sum(sizes) < _LOOPED:", "if False:"),
            ("sizes = *a.shape[lead:], b.shape[lead + 1 - contract[1]]", "sizes = (b.shape[lead + 1 - contract[1]],)"),
            ("return lax.reduce_sum(product(a, b, contract=contract, lead=1), (0,))", "return product(a, b, contract=contract, lead=1)[0]"),
            ("operands, axes = ((ct, b), (1, free)) if ca == 1 else ((b, ct), (free, 1))", "operands, axes = ((ct, b), (1, free))"),
            ("operands, axes = ((a, ct), (free, 0)) if cb == 0 else ((ct, a), (0, free))", "operands, axes = ((a, ct), (free, 0))"),
            ("if lead and a.shape[-1] <= _FEW:", "if lead and False:", "which orientation is fastest changes no sum"),
            ("ca, free = contract[0], 1 - contract[1]", "ca, free = contract[0], contract[1]"),
            ("precision=precision, preferred", "precision=None, preferred"),
        ],
    ),
    (
        "_sweep/nonfinite.py",
        "conformance/test_conformance.py",
        [("return jnp.exp(s - origin)\n", "return jnp.exp(s)\n")],
    ),
    (
        "_sweep/nonfinite.py",
        CORNERS,
        [
            ("return jnp.where(jnp.isfinite(x), x, 0)", "return x"),
            ("jnp.where(s == -jnp.inf, s, s - origin + poison)", "jnp.where(s == -jnp.inf, s, s - origin)"),
            ("return [num, den + (num * 0).sum(axis), top]", "return [num, den, top]"),
            ("parts.append(zero_nonfinite(x) * dscale)", "parts.append(x * dscale)"),
        ],
    ),
    (
        "_sweep/fold_step.py",
        FOLDS,
        [
            ("return p * weight[0] if weight else p, p.sum(int(turned))", "return p * weight[0] if weight else p, (p * weight[0] if weight else p).sum(int(turned))"),
            ("change_of_origin(new, safe_max(accs[2]))", "safe_max(new), jnp.ones_like(new)"),
            ("accs[1] * scale + den, new]", "accs[1] + den, new]"),
        ],
    ),
    (
        "_sweep/fold.py",
        FOLDS,
        [
            ("kept = p * weight[0] if weight else p", "kept = p"),
            ("dnum = dnum + dot(kept, dv[0], (0, 0), **kw)", "dnum = dot(kept, dv[0], (0, 0), **kw)"),
        ],
    ),
    (
        "_sweep/centred_tangent.py",
        "conformance/test_forward_mode.py",
        [
            ("return [off + mean[:, None] * again, again]", "return [off, again]"),
            ("(num - again) * _mean(dden, den)[..., None]", "(again - num) * _mean(dden, den)[..., None]"),
            ("return total / jnp.where(weight == 0, 1, weight)", "return total / weight"),
            ("mean = sum(moved, mean * (1 - share))", "mean = sum(moved, mean)"),
            ("mean = sum(moved, mean * (1 - share))", "mean = mean * (1 - share)"),
        ],
    ),
    (
        "strategies/_sharded.py",
        "ring/test_programs.py -k 'hops or zigzag'",
        [
            ("unroll = not self.metadata.scan_ring_attention", "unroll = False"),
            ("unroll = not self.metadata.scan_ring_attention", "unroll = self.metadata.scan_ring_attention"),
        ],
    ),
    (
        "strategies/_fold.py",
        "ring/test_programs.py -k 'hops'",
        [("ring = Rotation(axis, n, ahead, behind, unroll)", "ring = Rotation(axis, n, ahead, behind)")],
    ),
    (
        "_sweep/sweep.py",
        "sweep/test_sweep.py -k vmap",
        [
            ("table_axes = None if layout.table_axes is None else in_axes.pop(0)", "table_axes = layout.table_axes and in_axes.pop(0)[1:]"),
            ("x = jnp.squeeze(x, a.index(new) + (d is not None))", "x = jnp.squeeze(x, a.index(new))"),
        ],
    ),
    (
        "_sweep/loops.py",
        "sweep/test_sweep.py -k 'einsum or live'",
        [
            ("jnp.where(least == FULL, FULL, jnp.where(most == EMPTY, EMPTY, PARTIAL))", "jnp.where(least == FULL, FULL, jnp.where(least == EMPTY, EMPTY, PARTIAL))"),
        ],
    ),
    (
        "_sweep/fold_step.py",
        "scores/test_dropout.py -k every_strategy",
        [
            ("return p * weight[0] if weight else p, p.sum(int(turned))", "return p, p.sum(int(turned))"),
        ],
    ),
    (
        "_sweep/fold.py",
        "scores/test_dropout.py -k are_the_differences",
        [
            ("dden = (p * ds[0]).sum(0)", "dden = (kept * ds[0]).sum(0)"),
        ],
    ),
    (
        "_sweep/fold.py",
        "scores/test_features.py -k what_is_masked",
        [
            ("p = jnp.exp(s - finite_origin(m)[None])", "p = jnp.exp(s - m[None])"),
        ],
    ),
    (
        "_sweep/fold_step.py",
        "sweep/test_sweep.py -k visited_last",
        [
            ("new = jnp.maximum(accs[2], top)", "new = top"),
        ],
    ),
    (
        "_sweep/tokens.py",
        "sweep/test_token_rows.py",
        [
            ("return x.T if self.turned else x", "return x"),
            ("start, block = self._window(at), block.T if self.turned else block", "start = self._window(at)"),
            ("cut.count == layout.grid[ROW] * cut.block", "cut.count <= layout.grid[ROW] * cut.block"),
            ("first += [at[ROW] * self.cut.block, at[HEAD] * self.cut.group, 0]", "first += [at[ROW] * self.cut.block, at[HEAD], 0]"),
            ("if cut is None or layout.ring is not None or COL in axes or", "if cut is None or layout.ring is not None or"),
        ],
    ),
    (
        "_sweep/sweep.py",
        "sweep/test_memory.py -k mapped",
        [("dataclasses.replace(x, mapped=new)", "x")],
    ),
    (
        "_sweep/tokens.py",
        "sweep/test_memory.py -k 'listed or benchmark or few_queries'",
        [
            ("by_tokens(whole, place, layout, turned=backward)", "by_tokens(whole, place, layout, turned=False)"),
            ("whole = whole + _zero(operands, x.dtype) if late else whole", "pass"),
            ("late = backward and _wait(accumulators, operands)", "late = backward"),
        ],
    ),
]
