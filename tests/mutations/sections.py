"""Rotary positions of several axes, and the layers whose tokens have them."""

MUTANTS = [
    (
        "nn/_rotary.py",
        "nn/test_rotary_sections.py",
        [
            ("parts = sizes if sizes is not None and axial else (dim // 2,)", "parts = (dim // 2,)"),
            ("if dim is not None and sum(sizes) != dim // 2:", "if False:"),
            ("            axial=self.axial,\n", ""),
        ],
    ),
    (
        "nn/_rotary_scaling.py",
        "nn/test_rotary_sections.py",
        [
            ("for pairs in sections if pairs]", "for pairs in sections]"),
            ("of = plain_frequencies if scaling is None else scaling.frequencies", "of = plain_frequencies"),
        ],
    ),
    (
        "nn/_rotary.py",
        "nn/test_layer_sections.py -k errors",
        [("as_sections(given.sections, given.axial, turned(given.dim, size))", "turned(given.dim, size)")],
    ),
    (
        "nn/_positions.py",
        "nn/test_layer_sections.py",
        [
            ("lengths, given), (None, None)", "lengths, given), given"),
            ("if x is None and n:", "if False:"),
            ("found.append(jnp.zeros((n, axes), jnp.int32) if x is None else x)", "found.append(x)"),
        ],
    ),
    (
        "nn/_positions.py",
        "nn/test_layer_cache.py masks/test_trees.py -k 'errors or layers'",
        [
            ("if cache is not None and given[1] is not None:", "if False:"),
            ("return moved_positions(mask, given)", "return given"),
        ],
    ),
    (
        "nn/_latent.py",
        "nn/test_layer_sections.py -k latents",
        [("q_positions if cache is None or coordinates else None", "q_positions if cache is None else None")],
    ),
]  # fmt: skip
