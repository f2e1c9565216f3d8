"""Mutants of the kernel for NVIDIA GPUs over caches of 8 bits and of latents, and of what runs on a
GPU. Those of kernels need jax 0.12, as their tests do.
"""
# fmt: off

EIGHT = "kernels/test_gpu_stored.py -k 'eight_bits or begin_at_lines or race'"
LATENTS = "kernels/test_gpu_stored.py -k 'test_latents'"
REFUSED = "kernels/test_gpu_stored.py -k no_kernel_for"

CLEANED = "kernels/test_cleaned_caches.py -k cuda"

MUTANTS = [
    (
        "kernels/gpu/_decode.py",
        CLEANED,
        [
            ("acc = jnp.where(across(poison, acc) == 0, acc, jnp.float32(jnp.nan))  # 0 may be -0", "pass"),
            ("total = total + scale * 0", "pass"),
            ("scale = jnp.where(jnp.abs(scale) < jnp.inf, scale, jnp.float32(0))", "pass"),
            ("return PARTIAL in self.programs or self.sizes.padded_keys != self.sizes.keys", "return False"),
            ("return cleaned, jnp.where(s == -jnp.inf, jnp.float32(0), total).sum(1)", "return cleaned, total.sum(1)"),
        ],
    ),
    (
        "kernels/gpu/_two_visits.py",
        CLEANED,
        [("mosaic.store((sums * 0).sum(1), memory)", "mosaic.store((sums[:, :8] * 0).sum(1), memory)")],
    ),
    (
        "kernels/gpu/_cleaning.py",
        CLEANED,
        [
            ("part[...] = jnp.where(fine, x, jnp.zeros_like(x))", "pass"),
            ("mosaic.store(found, poison.at[rows])", "mosaic.store(jnp.zeros_like(found), poison.at[rows])"),
            ("for k in range(0, keys, 16):", "for k in range(0, 16, 16):"),
            ("for i in range(0, columns, n):", "for i in range(0, n, n):"),
        ],
    ),
    (
        "kernels/gpu/_mosaic.py",
        "kernels/test_gpu_stored.py -k begin_at_lines",
        [("least = 128 // jnp.dtype(dtype).itemsize", "least = 1")],
    ),
    (
        "kernels/gpu/__init__.py",
        "kernels/test_gpu_default.py -k joined",
        [("together = 1 if request.itemsize == 1 and page % 32 else together", "pass")],
    ),
    (
        "kernels/__init__.py",
        "kernels/test_gpu.py -k kernels_by_default",
        [('kernels if backend != "triton" and kernels.measured else None', "kernels")],
    ),
    (
        "kernels/gpu/_decode.py",
        EIGHT,
        [
            ("products[i] = products[i] * lax.broadcast_in_dim(scale, shape, [1])", "pass"),
            ("row = lambda x: mosaic.vector(x, slot, sizes.tile_k)", "row = lambda x: mosaic.vector(x, 0, sizes.tile_k)"),
            ("weights = [x * scale for x in weights] or [scale]", "pass"),
            ("slot, place = self.slot(step), self.wide_slot(step)", "slot, place = self.slot(step), 0"),
            ("done = step - self.plan.sizes.wide", "done = step - self.plan.sizes.wide - 1"),
            ("free, arrived = (k_free, *v_free)[which]", "free, arrived = k_free"),
        ],
    ),
    (
        "kernels/gpu/_decode.py",
        LATENTS,
        [
            ("v_scales = k_scales[:1]", "v_scales = []"),
            ("s = ft.reduce(jnp.add, products)", "s = products[0]"),
        ],
    ),
    (
        "kernels/gpu/_stored.py",
        EIGHT,
        [
            ("place = where * jnp.int32(self.heads) + at[2]", "place = where * jnp.int32(self.heads)"),
            ("x = jnp.swapaxes(x.reshape(-1, x.shape[-1] // heads, heads), 1, 2)", "x = x.reshape(-1, heads, x.shape[-1] // heads)"),
        ],
    ),
    (
        "kernels/gpu/_stored.py",
        "kernels/test_gpu_ragged.py -k test_sizes",
        [
            ("return TILE if self.dim <= LARGEST else TILE // 2", "return TILE"),
            ("most = TILE // 2 if self.alone else TILE", "most = TILE"),
            ("return self.eight or len(self.widths) > 1", "return self.eight"),
            ("own += 2 * wide * self.tile_rows * sum(n for n, _ in self.widened)", "pass"),
            ("return 2 if self._stages(2) >= 2 else 1", "return 2"),
            ("return self.eight * (1 + (not self.shared))", "return self.eight"),
        ],
    ),
    (
        "kernels/gpu/_stored.py",
        REFUSED,
        [
            ("step = 2 * STEP if scaled else STEP", "step = STEP"),
            ("if scaled and query.dtype != jnp.bfloat16:", "if False:"),
        ],
    ),
    (
        "kernels/gpu/_parts.py",
        REFUSED,
        [("alone and i is not None", "alone"),],
    ),
    (
        "_tools/gpu_run/cli.py",
        "tools/test_gpu_run.py -k 'ends_a_process'",
        [
            ("inner = {name for name in busy if name not in self.tasks} or busy", "inner = busy"),
            ("self.skip |= inner | self.checks.keys()", "self.skip |= inner"),
            ("return bool(end.status and inner and self.tasks)", "return bool(end.status and self.tasks)"),
        ],
    ),
    (
        "_tools/gpu_run/cli.py",
        "tools/test_gpu_run.py -k 'one_case or few_failures'",
        [
            ("self.checks.get(name) or f", "f"),
            ("k.startswith(BY_XLA) == by_xla", "True"),
            ("for line in found.failures[:_SHOWN]:", "for line in found.failures:"),
            ('{**environment, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}', "environment"),
        ],
    ),
    (
        "_tools/gpu_run/child.py",
        "tools/test_gpu_run.py -k 'one_case or whole_lines'",
        [
            ("with _saying:", "if True:"),
            ("dict(found[job.part :: job.parts])", "dict(found)"),
            ("check_alive(e)\n\n\ndef ceiling", "pass\n\n\ndef ceiling"),
        ],
    ),
    (
        "_tools/process.py",
        "tools/test_gpu_run.py -k one_case",
        [("_telling(said) if status < 0 else said[-1]", "said[-1]"),],
    ),
    (
        "_tools/gpu_run/cases.py",
        "tools/test_gpu_run.py -k pairs",
        [
            ("seen = min(self.window or length, length)", "seen = self.window or length - 1"),
            ("length = self.tokens // (self.segments or 1)", "length = self.tokens"),
        ],
    ),
]
