"""Mutants of lists of keys on automatic meshes."""
# fmt: off

OWN = "strategies/test_listed_rows.py -k 'own_rows or summed_wide'"
SLOW = "strategies/test_listed_rows.py -m slow -k 'wherever or own_rows'"

MUTANTS = [
    (
        "_problem/listed_rows.py",
        OWN,
        [
            ("tokens[\"b_indices\"] = iota(batch)", "pass"),
            ("tokens[\"h_indices\"] = iota(heads)[None]", "pass"),
            ("sharded = {0: manual.batch, heads: manual.heads}", "sharded = {0: manual.batch}"),
            ("return widened(x, acc) if shared else x", "return x"),
            ("scale=jnp.asarray(problem.scale, acc)", "scale=problem.scale"),
        ],
    ),
    (
        "_problem/bound.py",
        "conformance/test_operand_dtypes.py -k beside_a_list",
        [
            ("HeldScore.of(score, acc, [read_of(x, acc) for x in xs], own, axes)", "score"),
        ],
    ),
    (
        "_problem/selected.py",
        OWN,
        [
            ("iota(batch) if problem.b_indices is None else problem.b_indices", "iota(batch)"),
            ("iota(heads) if problem.h_indices is None else problem.h_indices", "iota(heads)"),
        ],
    ),
    (
        "strategies/_fold_strategy.py",
        OWN,
        [
            ("by_hand = by_hand or lists_own_keys(problem)", "pass"),
        ],
    ),
    (
        "_problem/mesh.py",
        SLOW,
        [
            ("return not stored and not types_are_checked(problem)", "return not stored"),
        ],
    ),
    (
        "strategies/_listed_shards.py",
        SLOW,
        [
            ("return fold_on_device(own, manual=manual, **options)", "return fold_on_device(own, **options)"),
        ],
    ),
]
