"""Mutants of the statistics and of the largest logits."""
# fmt: off

STATS = "stats/test_stats.py"

MUTANTS = [
    (
        "stats/_call.py",
        STATS,
        [
            ("metadata.replace(softmax_aux=None)", "metadata"),
            ("inference=True,", "inference=False,"),
            ("return mean * self.share(logsumexp)", "return mean"),
            ("else (as_bias(bias), *score)", "else score"),
            ("jnp.ones_like(self.key[..., :1])", "jnp.zeros_like(self.key[..., :1])"),
            ("if not isinstance(strategy, AbstractFoldStrategy) or self.stored:", "if not isinstance(strategy, AbstractFoldStrategy):"),
            ("self.attend(self.value, Factor(fn),", "self.attend(self.value, fn,"),
            ("return not strategy.may_run_kernels(self.query.dtype)", "return True", "without the rounding of kernels both ways give the same"),
        ],
    ),
    (
        "stats/_scores.py",
        STATS,
        [
            ("return logit + amount.astype(logit.dtype) * _of_visible(", "return amount.astype(logit.dtype) * _of_visible("),
        ],
    ),
    (
        "stats/_stats.py",
        STATS,
        [
            ("call.share(logsumexp) * (call.with_sinks(safe) - mean)", "call.share(logsumexp) * (safe - mean)"),
            ("call.share(logsumexp) * (call.with_sinks(safe) - mean)", "(call.with_sinks(safe) - mean)"),
            ("jnp.where(logsumexp != -jnp.inf, 1 + 2 * mean, 0)", "1 + 2 * mean"),
            ("weights = weights * call.share(found)", "pass"),
            ("jnp.swapaxes(received[..., 0, :], -1, -2)", "received[..., 0, :].reshape(*call.rows[:-2], -1, call.rows[-1])"),
        ],
    ),
    (
        "stats/_call.py",
        f"{STATS} -k 'hands or parts or saves or other_rows or given'",
        [
            ("jax.lax.stop_gradient(origin).astype(self.dtype) - known", "jax.lax.stop_gradient(origin - known).astype(self.dtype)"),
            ("jnp.where(seen, x, 0) for x in (known, carry.max_so_far)", "x for x in (known, carry.max_so_far)"),
            ("return self.along(fn, self.total)[1]", "return self.along(fn, self.total)[1] * self.share(self.known)"),
            ("self.attend(self.unweighed, *more, Known(known), return_carry=True)", "self.attend(self.unweighed, *more, return_carry=True)"),
            ("return self.value[..., :0] if self.weighs else self.value", "return self.value"),
            ("known.shape != self.rows or", ""),
        ],
    ),
    (
        "stats/_scores.py",
        f"{STATS} -k 'hands or parts or saves or other_rows or given'",
        [
            ("return operands[0] - logit", "return -logit"),
        ],
    ),
    (
        "_sweep/recall.py",
        f"{STATS} -k 'hands or parts or saves or given'",
        [
            ("jax.lax.stop_gradient(logsumexp)", "logsumexp"),
            ("den = (top != -jnp.inf).astype(top.dtype)", "den = jnp.zeros_like(top)", "of a sum, only derivatives are read"),
            ("if not isinstance(t, SymbolicZero)", ""),
            ("tangent_arguments(operands, moved, top,", "tangent_arguments(operands, moved, jnp.zeros_like(top),"),
            ("t.astype(read[i]) for i, t in moves", "t for i, t in moves", "what statistics move, a bias and a factor, is wide"),
        ],
    ),
    (
        "_sweep/fold.py",
        f"{STATS} -k 'all_probabilities or forward_mode'",
        [
            ("if weighs and ds is not None:", "if False:"),
            ("bool(_read_by(logits.jaxpr, 1) & {*inner})", "bool(_read_by(logits.jaxpr, 0) & {*inner})", "only speed: of dropout, it adds a product with 0"),
            ("dot(p * ds[1], v", "dot(kept * ds[1], v"),
        ],
    ),
    (
        "_sweep/fold_step.py",
        STATS,
        [
            ("(v * kept).sum(0)[None]", "kept.sum(0)[None]", "values of a statistic are 1"),
            ("self.width == 1 and not self.grouped", "self.width == 1"),
        ],
    ),
    (
        "_problem/operands.py",
        STATS,
        [
            ("(s, [y]) if part.weighs else (y, weight)", "(y, weight)"),
            ("y = score(mask, s, *pairs, *xs)", "y = score(None, s, *pairs, *xs)"),
        ],
    ),
    (
        "scores/_wrapper.py",
        STATS,
        [("return self.score.weighs", "return False")],
    ),
    (
        "strategies/_results.py",
        f"{STATS} -k 'strategies or largest'",
        [
            ("unflatten(before.max_so_far)", "unflatten(carry.max_so_far)"),
            ("jax.lax.stop_gradient(unflatten(before.max_so_far))", "unflatten(before.logsumexp())"),
        ],
    ),
]
