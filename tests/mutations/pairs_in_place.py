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
            ("if layout.ring is not None or not can_lie", "if not can_lie", "the layout of a ring has no tokens, without which nothing lies in place"),
        ],
    ),
    (
        "_sweep/tokens.py",
        PAIRS,
        [
            ("if n != 1 or not undone]", "]"),
            ("return grid[ROW] * grid[COL] > 1 and all(", "return all("),
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
            ("copied = not lie and reads_pairs", "copied = reads_pairs"),
            ("lie = can_lie(self.blocking.tokens, self.blocking.grid)", "lie = True"),
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
        "_problem/closed_score.py",
        "ring/test_lists_on_meshes.py",
        [("if self.mesh != jax.sharding.get_abstract_mesh():", "if False:")],
    ),
    (
        "strategies/_listed_shards.py",
        "ring/test_lists_on_meshes.py",
        [("return padded(x, axis, t + missing, edge=True)", "return padded(x, axis, t + missing, edge=False)")],
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
]
