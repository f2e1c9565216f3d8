"""Mutants of calls, rows and caches of which some arrays lie on explicit axes of a mesh."""
# fmt: off

SHARDING = "problem/test_sharding.py -k no_mesh"
ROWS = "test_carry.py -k explicit"

MUTANTS = [
    (
        "_problem/mesh.py",
        "test_arguments.py -k 'strange_arguments and attention'",
        [("if isinstance(other, jax.Array) and explicit_axes(other):", "if explicit_axes(other):")],
    ),
    (
        "_problem/mesh.py",
        SHARDING,
        [
            ("return reshard(x, NamedSharding(jax.typeof(other).sharding.mesh, P()))", "return x"),
            ("if isinstance(other, jax.Array) and explicit_axes(other):", "if isinstance(other, jax.Array) and other.ndim > 3 and explicit_axes(other):"),
        ],
    ),
    (
        "masks/_tree.py",
        SHARDING,
        [("without_explicit_axes(lambda x: _preorder(xp, x), (parents,), parents, specs)", "_preorder(xp, parents)")],
    ),
    (
        "_carry/rows.py",
        ROWS,
        [
            ("if names and not names & used:", "if names:"),
            ("names = {*names_of(entry)}", "names = {entry} - {None}"),
        ],
    ),
    (
        "cache/_base.py",
        "cache/test_explicit_meshes.py -k values_of",
        [("place = lambda x: on_mesh_of(x, args) if eqx.is_array(x) else x", "place = lambda x: x")],
    ),
    (
        "_problem/selected.py",
        "masks/test_selected.py -k keeps_no_copies",
        [("visit = keep(keep(visit))", "visit = keep(visit)")],
    ),
    (
        "stats/_stats.py",
        "stats/test_sharded.py -k known_logsumexp",
        [("pull(weights + jnp.zeros_like(found))", "pull(weights)")],
    ),
    (
        "nn/_latent.py",
        "nn/test_heads_over_devices.py -k latents",
        [("rest = rest[..., None, :] + jnp.zeros_like(key[..., :1], rest.dtype)", "rest = jnp.broadcast_to(rest[..., None, :], (*key.shape[:-1], rest.shape[-1]))")],
    ),
]
