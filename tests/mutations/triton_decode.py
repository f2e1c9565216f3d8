"""Mutants of decoding by Pallas Triton, and of the blocks in which XLA code reads caches on a GPU."""
# fmt: off

KINDS = "kernels/test_triton_ragged.py -k caches_of_any_kind"
MEMORY = "kernels/test_triton_ragged.py -k inside_of_arrays"
SIZES = "kernels/test_triton_ragged.py -k test_sizes"
FLOAT8 = "kernels/test_triton_ragged.py -k chip_has_none"

MUTANTS = [
    (
        "kernels/gpu/triton/_decode.py",
        KINDS,
        [
            ("token = keys - page * source.tokens", "token = keys"),
            ("token = column * jnp.int32(sizes.keys) + keys", "token = column * jnp.int32(sizes.tile_k) + keys"),
            ("at = token * jnp.int32(sizes.heads) + self.head", "at = token * jnp.int32(sizes.heads)"),
            ("products.append(product if scale is None else product * across(scale))", "products.append(product)"),
            ("s = jnp.where(across(keys < sizes.keys), s, -jnp.inf)", "pass"),
            ("value, scale = tiles[0], scales[0]", "value, scale = tiles[0], None"),
            ("weights = [x * across(scale) for x in weights] or [across(scale)]", "pass"),
            ("tops[self.out, inside] = top * (1 / LOG2E)", "tops[self.out, inside] = top"),
        ],
    ),
    (
        "kernels/gpu/triton/_decode.py",
        MEMORY,
        [
            ("page = jnp.minimum(page, source.pages - 1)", "pass"),
            ("page = jnp.clip(triton.entries(self.tables[which][0], (row, page)), 0, count - 1)", "page = triton.entries(self.tables[which][0], (row, page))"),
            ("triton.put_rows(num, acc, (self.out, self.tile, own), written)", "triton.put_rows(num, acc, (self.out, self.tile, own), None)"),
            ("there = token < source.tokens", "there = token <= source.tokens"),
        ],
    ),
    (
        "kernels/gpu/triton/_decode.py",
        SIZES,
        [
            ("while most > 16 and most * self.numbers * self.itemsize > TILE_BYTES:", "while most > 16 and most * self.numbers > TILE_BYTES:"),
            ("return sum(self.padded_dims) + self.padded_width * (not self.shared)", "return sum(self.padded_dims) + self.padded_width"),
            ("return min(self.of_head, self.tile_r)", "return self.tile_r"),
            ("return 8 if self.padded_width > 256 else 4", "return 4"),
        ],
    ),
    (
        "kernels/gpu/triton/__init__.py",
        SIZES,
        [("together = min(max(most // page, 1), -(-request.keys // page)) if page else 0", "together = max(most // page, 1) if page else 0")],
    ),
    (
        "kernels/gpu/triton/__init__.py",
        "kernels/test_gpu_triton.py -k soft_cap",
        [('return NATIVE | {"tanh"} if dtype == jnp.float32 else NATIVE', "return NATIVE")],
    ),
    (
        "kernels/gpu/triton/_triton.py",
        FLOAT8,
        [
            ("y = jnp.where(rest == 127, jnp.float16(jnp.nan), y * jnp.float16(2.0**8))", "y = y * jnp.float16(2.0**8)"),
            ("(rest << jnp.int16(7)) | (bits & jnp.int16(-32768))", "rest << jnp.int16(7)"),
        ],
    ),
    (
        "kernels/gpu/_stored_arrays.py",
        "kernels/test_cleaned_caches.py",
        [
            ("return complete(num[0], den[0], top[0], -1)", "return [num[0], den[0], top[0]]"),
            ("return complete((num * scale[..., None]).sum(0), (den * scale).sum(0), most, -1)", "return [(num * scale[..., None]).sum(0), (den * scale).sum(0), most]"),
        ],
    ),
    (
        "kernels/gpu/_stored_arrays.py",
        KINDS,
        [
            ("_, scale = change_of_origin(most[None], top)", "scale = jnp.ones_like(top)"),
            ("x = lax.slice_in_dim(x, 0, sizes.of_head, axis=2 + len(kept))", "x = lax.slice_in_dim(x, x.shape[2 + len(kept)] - sizes.of_head, x.shape[2 + len(kept)], axis=2 + len(kept))"),
        ],
    ),
    (
        "kernels/gpu/_stored_program.py",
        KINDS,
        [
            ("self.last = jnp.minimum(self.first + each, live)", "self.last = self.first + each", "blocks that are not live are masked, and only cost time"),
            ("self.head, _ = divided(self.tile, sizes.tiles // sizes.heads)", "self.head = self.tile"),
            ("self.full = jnp.clip(full, self.first, self.last)", "self.full = jnp.minimum(full, self.last)"),
        ],
    ),
    (
        "_problem/problem.py",
        "kernels/test_differences.py -k 'ones_own or logarithms'",
        [
            ('return _unwrapped(part).may_lack_kernels or _is_foreign(part)', "return _unwrapped(part).may_lack_kernels"),
            ('return _unwrapped(part).may_lack_kernels or _is_foreign(part)', 'return _is_foreign(part)'),
        ],
    ),
    (
        "strategies/_in_kernels.py",
        "kernels/test_gpu_default.py -k lack_an",
        [("masks = [x for x in leaf_terms(mask) if not x.selects and is_unsure(x)]", "masks = []")],
    ),
    (
        "_sweep/lowering.py",
        "kernels/test_lowerings.py -k 'large_blocks_of_caches or several_pages'",
        [
            ("return max(min(keys // page, 32, -(-request.keys // page)), 1) * page", "return max(min(keys // page, 32), 1) * page"),
            ("return max(min(keys // page, 32, -(-request.keys // page)), 1) * page", "return max(min(keys // page, -(-request.keys // page)), 1) * page"),
            ("if gpu and request.in_place and not request.fixed:", "if gpu and request.in_place:"),
        ],
    ),
]
