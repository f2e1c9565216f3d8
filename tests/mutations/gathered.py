"""Mutants of visits of gathered columns, and of the comparison of strategies over devices."""
# fmt: off

MUTANTS = [
    (
        "_sweep/gathering.py",
        "ring/test_all_gather.py ring/test_against_oracle.py -k 'is_sent or own_shard_map or gathered_keys'",
        [
            ("return COL in axes and ROW not in axes", "return COL in axes"),
            ("return self.size", "return 1"),
            ("return lax.psum_scatter(x, gathering.axis, scatter_dimension=at, tiled=True)", "return lax.dynamic_slice_in_dim(lax.psum(x, gathering.axis), lax.axis_index(gathering.axis) * (x.shape[at] // gathering.size), x.shape[at] // gathering.size, at)"),
        ],
    ),
    (
        "_sweep/sweep.py",
        "ring/test_all_gather.py -k own_shard_map",
        [("grid[a] * (ring.together if a == COL else 1)", "grid[a]")],
    ),
    (
        "strategies/_fold_strategy.py",
        "ring/test_all_gather.py -k other_axes",
        [("if lowering.splits_over_devices and not by_hand:", "if lowering.splits_over_devices:")],
    ),
    (
        "strategies/all_gather.py",
        "ring/test_all_gather.py -k is_sent",
        [("self.layout, gathers=True)", "self.layout)")],
    ),
    (
        "_ring/choice.py",
        "ring/test_choice.py",
        [
            ("held=own * (2 if moves else 1)", "held=own"),
            ("there = (n - 1) * own", "there = n * own"),
            ("move[-1] = 0", "pass"),
            ("sent / (self.bandwidth * self.links) + self.latency * steps", "sent / self.bandwidth + self.latency * steps"),
            ("repeated = math.lcm(kv_heads, group) // kv_heads", "repeated = 1"),
            ("found.sort(key=lambda x: (bool(x.unable), x.seconds))", "found.sort(key=lambda x: x.seconds)"),
            ("seconds=work * (1 + _BACKWARD) / machine.flops + exchange", "seconds=work * _BACKWARD / machine.flops + exchange"),
        ],
    ),
]
