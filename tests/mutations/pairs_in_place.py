"""Mutants of pairs that loops read where they lie, and of what was found beside them."""
# fmt: off

PAIRS = "sweep/test_token_pairs.py"

MUTANTS = [
    (
        "_sweep/token_pairs.py",
        PAIRS,
        [
            ("near = (layout.turned and layout.stage == \"fold\") or x.dtype.itemsize > 1", "near = True"),
            ("first += [at.get(a, 0) * n for", "first += [at.get(a, 0) for"),
            ("{(keys, group * queries): group, (keys, 1, queries): 1}", "{(keys, group * queries): group}"),
            ("return new if isinstance(new, TokenPairs) else x", "return x"),
            ("if layout.ring is not None or {*cut}", "if {*cut}", "the layout of a ring has no tokens, without which nothing lies in place"),
        ],
    ),
    (
        "_sweep/tokens.py",
        PAIRS,
        [
            ("if n != 1 or not undone]", "]"),
            ("return are_whole(tokens, grid) and grid[ROW] * grid[COL] > 1", "return are_whole(tokens, grid)"),
            ("t.count == grid[a] * t.block for", "t.count <= grid[a] * t.block for"),
        ],
    ),
    (
        "_sweep/loops.py",
        PAIRS,
        [("return (layout.ragged or isinstance(x, TokenPairs)) and narrow", "return layout.ragged and narrow")],
    ),
    (
        "_problem/operands.py",
        "sweep/test_turned.py",
        [
            ("copied = not self.blocking.pairs_lie and reads_pairs", "copied = reads_pairs"),
            ("copied = not self.blocking.pairs_lie and", "copied = False and"),
        ],
    ),
    (
        "kernels/tpu/_operands.py",
        "kernels/test_tpu_flags.py",
        [
            ("return sides, jnp.int8", "return block, jnp.int8", "it is a block of one shape with fewer axes; only how it lies differs"),
            ("if full and sides[0] % 32 == 0 == sides[1] % LANES:", "if full and sides[1] % LANES == 0:"),
            ("full = len(block) > 1 and math.prod(sides) == math.prod(block)", "full = False"),
        ],
    ),
    (
        "kernels/tpu/_operands.py",
        "kernels/test_tpu_pairs.py",
        [
            ("return queries % 32 == 0 == keys % LANES", "return queries % 16 == 0 == keys % LANES"),
            ("return queries % 32 == 0 == keys % LANES", "return queries % 32 == 0 == keys % 64"),
            ("at_most(reads, MOST_READS)", "at_most(reads, MOST_READS + 1)"),
            ("at_most(reads, MOST_READS)", "at_most(reads, MOST_READS - 1)"),
            ("near = turned or x.dtype.itemsize == 4 or", "near = turned or"),
            ("near = turned or x", "near = x"),
            ("self.array = x.astype(jnp.int8) if x.dtype == jnp.bool_ else x", "self.array = x"),
            ("if len(shape) != 2 or (sizes", "if (sizes"),
        ],
    ),
    (
        "kernels/tpu/_grid.py",
        "kernels/test_tpu_pairs.py",
        [
            ("return *at, 0, where.get(ROW, 0), where.get(COL, 0)", "return *at, 0, where.get(COL, 0), where.get(ROW, 0)"),
            ("counts = (self.layout.grid[a] if a in axes else 1 for", "counts = (1 for"),
            ("at = self._beside(lead, at, 0) if several else at", "at = self._beside(lead, at, 1) if several else at"),
        ],
    ),
    (
        "kernels/tpu/_forward.py",
        "kernels/test_tpu_pairs.py",
        [("pairs = None if main.multiplied[i] else PairsOperand.of(", "pairs = PairsOperand.of(")],
    ),
    (
        "kernels/tpu/_backward.py",
        "kernels/test_tpu_pairs.py",
        [
            ("if not main.multiplied[n + i]:", "if True:"),
            ("form: Any = dict(flipped=flipped, turned=last, heads=heads, window=windows.get(i))", "form: Any = dict(flipped=flipped, turned=last, heads=heads)"),
            ("                sums[i][part] += y", "                sums[i][part] = y"),
        ],
    ),
    (
        "kernels/tpu/_backward_step.py",
        "kernels/test_tpu_pairs.py",
        [
            ("own = self._depends(rest) and self._dots(rest) is None", "own = self._depends(rest)", "queries as long as blocks would be summed as pairs, to the same numbers"),
            ("    if step.main.of_pairs:\n        return True\n", ""),
        ],
    ),
    (
        "kernels/tpu/_program.py",
        "kernels/test_tpu_pairs.py",
        [("return self._cut(self.value(v, turn), turn)", "return self._cut(self.value(v))", "the compiler would transpose a block, and not each window of it")],
    ),
    (
        "kernels/gpu/_operands.py",
        "kernels/test_gpu_pairs.py",
        [
            ("if layout.block[1] != sizes[1] and sizes[1] % TILE:", "if False:"),
            ("if sizes is None or (lengths[\"k\"], lengths[\"r\"]) != layout.block:", "if sizes is None:"),
            ("head = jnp.int32(0) if self.heads == 1 else head", "head = jnp.int32(0)"),
            ("moved(rows, query + first)", "moved(rows, query + rows.start)"),
            ("moved(keys, key + keys.start)", "moved(keys, key)"),
            ("return self.kind == \"kr\"", "return False"),
        ],
    ),
    (
        "_problem/closed_score.py",
        "ring/test_lists_on_meshes.py",
        [("if self.mesh != jax.sharding.get_abstract_mesh():", "if False:")],
    ),
    (
        "strategies/_listed_shards.py",
        "ring/test_lists_on_meshes.py",
        [("return padded(x, axis, t + missing, \"last\")", "return padded(x, axis, t + missing, \"zeros\")")],
    ),
    (
        "strategies/_sharded.py",
        "strategies/test_axis_names.py",
        [("check_axis_name(field, getattr(self, field, None))", "pass")],
    ),
    (
        "_config/json.py",
        "config/test_json.py",
        [
            ("if weak_type and data.shape == ():", "if False:"),
            ("if body[\"kind\"] not in (\"jax\", \"numpy\", \"scalar\"):", "if False:"),
            ("except (TypeError, AttributeError, binascii.Error) as e:", "except binascii.Error as e:"),
            ("if len(ids) != math.prod(shape) or not isinstance(platform, str):", "if not isinstance(platform, str):", "NumPy then says that it cannot reshape"),
        ],
    ),
    (
        "nn/_dropout.py",
        "nn/test_multihead.py -k 'dropout or inference'",
        [
            ("return cls(settings.p, settings.inference)", "return cls(settings.p, False)"),
            ("if isinstance(inference, str | bytes | list | tuple | dict):", "if False:"),
        ],
    ),
    (
        "kernels/gpu/_lowering.py",
        "kernels/test_gpu_pairs.py",
        [
            ("if request.reads_pairs:", "if False:"),
        ],
    ),
    (
        "_pairs.py",
        "kernels/test_gpu_pairs.py",
        [
            ("min(self.array.shape[-2:]) > 1", "True"),
            ("return self.axes.endswith(\"ts\") and", "return"),
        ],
    ),
    (
        "_problem/problem.py",
        "kernels/test_gpu_pairs.py",
        [
            ("return (*self.scores, *([] if self.mask is None else [self.mask]))", "return self.scores"),
            ("for part in self.parts for _, x", "for part in self.parts[len(self.scores) :] for _, x"),
        ],
    ),
    (
        "_sweep/tokens.py",
        "sweep/test_tokens.py",
        [
            ("if by == \"zeros\":", "if False:"),
            ("if by == \"again\" and n <= 2 * m:", "if False:"),
            ("if by == \"again\" and n <= 2 * m:", "if by == \"again\":"),
            ("slice(2 * m - n, m)", "slice(0, n - m)"),
            ("end if xp is np else lax.stop_gradient(end)", "end"),
        ],
    ),
    (
        "_problem/blocking.py",
        "sweep/test_tokens.py",
        [
            ("by: Padding = \"last\" if 1 in (t, s) else \"again\"", "by: Padding = \"last\""),
            ("return self.joins or can_lie", "return can_lie"),
        ],
    ),
    (
        "_sweep/block_sizes.py",
        "sweep/test_tokens.py",
        [
            ("if isinstance(tokens, int) and tokens > most:\n        divisors", "if False:\n        divisors"),
            ("range(most, most // 3, -1)", "range(most, 0, -1)"),
        ],
    ),
]
