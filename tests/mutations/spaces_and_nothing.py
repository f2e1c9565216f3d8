"""Mutants of what functions read off classes and modules, of what weighs nothing, and of nothing."""
# fmt: off

MUTANTS = [
    (
        "_closure/closure.py",
        "test_closure.py -k 'holds_now or in_its_key or compiled_once or told_apart'",
        [
            ("if first and isinstance(x, _SPACES) and not isinstance(x, enum.EnumMeta):", "if False:"),
            ("(x.__globals__ is space or not is_installed(x.__module__ or \"\"))", "x.__globals__ is space"),
            ("_take_read(names_in(fn.__code__), _spaces([method.__self__]))", "_take_read(names_in(fn.__code__), [])"),
            ("_take_read(names_in(code), _spaces(each(x)[1:]))", "_take_read(names_in(code), [])"),
            ("[*_spaces(held), *found]", "found"),
            ("_joined((\"globals\", *read), parts", "_joined(\"globals\", list({p.key: p for p in parts}.values())"),
            ("if not part.known or part.arrays:", "if not part.known:"),
        ],
    ),
    (
        "_closure/code.py",
        "test_closure.py -k 'holds_now or in_its_key or compiled_once or told_apart'",
        [("(*c.co_names, *filter(_is_name, c.co_consts))", "c.co_names")],
    ),
    (
        "stats/_scores.py",
        "stats/test_weightless.py",
        [
            ("return jnp.where(hidden, jnp.zeros_like(found), found)", "return found"),
            ("score.transform(jnp.where(hidden, 0, logit), *rest)", "score.transform(logit, *rest)"),
        ],
    ),
    (
        "_carry/carry.py",
        "test_carry.py -k 'reaches_the_rows or are_floats'",
        [
            ("jnp.where(finite, values, 0)", "values"),
            ("jnp.where(poisoned[..., None], jnp.nan, numerator)", "numerator"),
            ("seen = jnp.where(logits == -jnp.inf, 0, 1).astype(dtype)", "seen = jnp.ones_like(logits)"),
            ("if not jnp.issubdtype(dtype, jnp.floating):", "if False:"),
        ],
    ),
    (
        "stats/_top_keys.py",
        "test_top_keys.py -k 'errors or as_bits'",
        [
            ("strategy.selected_forward()", "pass"),
            ("stored, key = False, jnp.asarray(key_)", "pass"),
        ],
    ),
    (
        "strategies/_base.py",
        "strategies/test_few_keywords.py",
        [
            ("self.undeclared([*used, *extras])", "self.undeclared(extras)"),
            ("usual = {name: x for name, x in usual.items() if self._declares(name)}", "pass"),
            ("\"dropout_rng\" if name in (\"key\", \"dropout\") else name", "name"),
        ],
    ),
    (
        "_problem/storage.py",
        "cache/test_nothing.py",
        [("max(-1, initial=0)", "max(-1)")],
    ),
    (
        "_problem/stack_layer.py",
        "cache/test_stack_layer.py -k pages_of",
        [
            ("x.reshape(layers * each.size, size,", "x.reshape(-1, size,"),
            (".reshape(rows, s // size)", ".reshape(rows, -1)"),
        ],
    ),
    (
        "_problem/row_pages.py",
        "cache/test_nothing.py",
        [("reshape(rows, devices * tokens)", "reshape(rows, -1)")],
    ),
    (
        "_calls/cascade.py",
        "cache/test_nothing.py",
        [("if 0 in (b, t):", "if False:")],
    ),
    (
        "cache/_base.py",
        "cache/test_nothing.py",
        [("return np.zeros(0, np.int32) if none else as_array", "return as_array")],
    ),
    (
        "cache/_ring_buffer.py",
        "cache/test_nothing.py",
        [("held != keys[:2]", "held[:1] != keys[:1]")],
    ),
    (
        "masks/_intervals/classify.py",
        "masks/test_masks.py -k 'module_as_function'",
        [("visible = lambda *xs: mask.visible(*xs)", "visible = mask.visible")],
    ),
    (
        "_sweep/loops.py",
        "sweep/test_memory.py -k single_blocks",
        [("dropped = {a for a in looped if layout.grid[a] == 1}", "dropped = set()")],
    ),
    (
        "_sweep/lowering.py",
        "sweep/test_sweep.py -k 'visits or einsum'",
        [("small = small and at_most(math.prod(layout.shape(layout.batch)) * logits, 2**17)", "pass", "it is a choice of speed, which the bench measures")],
    ),
    (
        "_problem/fold.py",
        "kernels/test_attend.py -k minus_infinity",
        [("joint_logit(sinks.astype(problem.accumulation_dtype))", "jax.nn.logsumexp(sinks.astype(problem.accumulation_dtype), -1)")],
    ),
    (
        "stats/_call.py",
        "stats/test_weightless.py -k minus_infinity",
        [("joint_logit(sinks.astype(self.dtype))", "jax.nn.logsumexp(sinks.astype(self.dtype), -1)")],
    ),
    (
        "nn/_rotary.py",
        "nn/test_rotary.py -k narrow",
        [("jnp.finfo(theta.dtype).bits < jnp.finfo(dtype).bits", "False")],
    ),
    (
        "nn/_dropout.py",
        "nn/test_multihead.py -k may_be_traced",
        [(" or (stopped is not None and stopped):", ":")],
    ),
]
