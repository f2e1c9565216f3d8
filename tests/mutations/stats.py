"""Mutants of the statistics and of the largest logits."""
# fmt: off

STATS = "stats/test_stats.py"

MUTANTS = [
    (
        "stats/_stats.py",
        STATS,
        [
            ("metadata.replace(softmax_aux=None)", "metadata"),
            ("inference=True,", "inference=False,"),
            ("return logit + amount.astype(logit.dtype) * self.score", "return amount.astype(logit.dtype) * self.score"),
            ("return mean * call.share(logsumexp)", "return mean"),
            ("call.share(logsumexp) * (call.with_sinks(safe) - mean)", "call.share(logsumexp) * (safe - mean)"),
            ("call.share(logsumexp) * (call.with_sinks(safe) - mean)", "(call.with_sinks(safe) - mean)"),
            ("jnp.where(logsumexp != -jnp.inf, 1 + 2 * mean, 0)", "1 + 2 * mean"),
            ("call.rows) * call.share(logsumexp)", "call.rows)"),
            ("(Bias(bias), *score)", "score"),
            ("jnp.swapaxes(received[..., 0, :], -1, -2)", "received[..., 0, :].reshape(*call.rows[:-2], -1, call.rows[-1])"),
        ],
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
