"""Mutants of latents, of pages that rows share, and of floats kept as bits."""
# fmt: off

SHARED = "cache/test_shared_pages.py -k 'copied or nothing_is_lost or cannot_be_shared'"
CASCADE = "cache/test_shared_pages.py -k 'cascade or in_part or went_back'"
LATENT = "cache/test_latent.py -k 'gradients or whole or read_once or fit'"

MUTANTS = [
    (
        "cache/_page_table.py",
        SHARED,
        [
            ("copied[at] = users[page] > 1", "copied[at] = True"),
            ("copied[at] = users[page] > 1", "copied[at] = False"),
            ("users[page] -= copied[at]", "pass"),
            ("written &= np.broadcast_to(counts > 0, length.shape)[:, None]", "pass"),
            ("= old[kept], table[kept]", "= table[kept], old[kept]"),
            ("kept = copied & (part * page_size < length[:, None])", "kept = copied & (part * page_size > length[:, None])"),
            ("table[from_row, :parts] = -2 - pages_of(table[from_row, :parts])", "pass"),
            ("parts = -(-tokens // page_size)", "parts = tokens // page_size"),
            ("jnp.where(many[:, None] & (table >= 0), -2 - table, table)", "table"),
            ("if tokens > length[from_row]:", "if False:"),
            ("return np.where(table < -1, -2 - table, table)", "return table"),
            ("return jnp.where(table < -1, -2 - table, table)", "return table"),
        ],
    ),
    (
        "_calls/cascade.py",
        CASCADE,
        [
            ("reach = jnp.minimum(equal * size, lengths)[None]", "reach = (equal * size)[None]"),
            ("shared = jnp.where(mine, reach, jnp.iinfo(jnp.int32).max).min(1)", "shared = jnp.where(mine, reach, 0).max(1)"),
            ("KeyPadding(cache.length, found[-1].ends)", "KeyPadding(cache.length)"),
            ("KeyPadding(ends, groups.starts[place.row])", "KeyPadding(ends)"),
            ("[visit(groups) for groups in found]", "[visit(groups) for groups in found[:1]]"),
            ("there = lengths > starts", "there = lengths > 0"),
            ("jnp.maximum(ends, starts)", "ends"),
            ("q_positions=positions[row, token],", "q_positions=0 * row,"),
            ("ft.reduce(jnp.minimum, trunks, offset)", "offset"),
            ("jnp.broadcast_to(moved_positions(mask, places), (b, t))", "places"),
            ("True if term.moves_positions else None", "None", "a tree shows its trunk itself, pair by pair"),
            ("place.live & (mask is not False)", "place.live"),
            ("mask=shown if mask is None else shown & mask_of_rows(mask, rows),", "mask=shown,"),
            ("score=scores_of_rows(scores, rows, query.dtype) or None,", "score=scores or None,"),
            ("row, token = order[tokens", "row, token = jnp.arange(b)[tokens"),
            ("jnp.maximum(largest, shared.max_logits)", "own.max_logits"),
            ("if term.selects or (by_row or term.moves_positions) and term.trunk() is None:", "if term.selects:"),
            ("x[at].reshape(b, t, *x.shape[2:])[back]", "x[at].reshape(b, t, *x.shape[2:])"),
            ("strategy.metadata.replace(softmax_aux=None, blocksize_q=block_q)", "strategy.metadata.replace(blocksize_q=block_q)"),
            ("packed = query[order].reshape", "packed = query.reshape"),
        ],
    ),
    (
        "_problem/packed_rows.py",
        CASCADE,
        [
            ("jnp.moveaxis(x[at[0], :, at[1]], 1, 2)", "x[at[0], :, at[1]]"),
            ("i if n > 1 else 0 * i for i, n in", "0 * i for i, n in"),
            ("        if x.shape[3] > 1:", "        if False:"),
            ("if x.shape[0] == x.shape[2] == 1:", "if x.shape[0] == 1:"),
        ],
    ),
    (
        "_problem/joined.py",
        LATENT,
        [
            ("same = len(mine) == len(theirs) and all(a is b for a, b in zip(mine, theirs))", "same = False"),
            ("return key[..., : self._shape[-1]]", "return key[..., -self._shape[-1] :]"),
            ("return jnp.concatenate(made, -1)", "return jnp.concatenate(made[::-1], -1)"),
            ("if first.shape[:-1] != rest.shape[:-1] or first.dtype != rest.dtype:", "if False:"),
        ],
    ),
    (
        "_sweep/fold.py",
        LATENT,
        [
            ("read = [*layout.shared, *range(n, count)]", "read = [*range(n, count)]"),
            ("of_values = tuple(moved[active.index(read[j])] for j in outer)", "of_values = tuple(0 * moved[active.index(read[j])] for j in outer)"),
        ],
    ),
    (
        "cache/_base.py",
        "cache/test_cache_memory.py -k bits_where",
        [
            ("bits = jnp.dtype(dtype) == jnp.bfloat16 and jax.default_backend() == \"cpu\"", "bits = False"),
            ("bits = jnp.dtype(dtype) == jnp.bfloat16 and", "bits = jnp.dtype(dtype).itemsize < 4 and"),
        ],
    ),
]
