"""How many programs a call compiles."""

import jax


_COMPILED = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: _COMPILED.append(event) if "backend_compile" in event else None
)


def programs(call) -> int:
    """The number of programs that are compiled until all arrays of `call()` are there."""
    _COMPILED.clear()
    jax.block_until_ready(jax.tree.leaves(call()))
    return len(_COMPILED)
