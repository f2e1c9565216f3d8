"""Many devices: rows stay, columns rotate around a mesh axis."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import auto_axes, AxisType, PartitionSpec as P
from jaxtyping import Array

from .._blocking import choose_blocking
from .._blocks import fold_problem
from .._cached import cached
from .._carry import Carry
from .._compat import automatic, varying_axes
from .._manual import Manual
from .._metadata import AttentionMetadata
from .._problem import Problem
from .._registry import AttentionRegistry
from .._ring import Rotation
from .._ring_layout import AbstractRingLayout, Contiguous
from .._ring_plan import reach
from ._exact import AbstractExact
from .blockwise import fold_blocks


class _Place(NamedTuple):
    """Where a ring is: its axis, and the mesh that it is automatic in (None: it is manual)."""

    axis: str
    size: int
    mesh: Any

    @property
    def explicit(self) -> tuple[str, ...]:
        return () if self.mesh is None else tuple(self.mesh.explicit_axes)

    @property
    def manual(self) -> Manual | None:
        return None if self.mesh is None else Manual(self.mesh, tokens=(self.axis,))


@cached
def _fold(problem: Problem, *, block_q, block_k, place, manual, layout, unroll, fused, kernel):
    axis, n, mesh = place
    t, s, _, _ = problem.sizes
    if mesh is None and s == 1:
        raise ValueError(
            f"key {problem.key.shape} [b, s, k, d] has one token on each of {n} devices; a ring "
            "in your own shard_map needs two or more."
        )
    ahead, behind = reach(problem, layout, n)

    def tokens(length):
        return layout.tokens(length, n) if mesh is not None else layout.own_tokens(length, n, axis)

    q, k = problem.q_positions, problem.kv_positions
    problem = dataclasses.replace(
        problem,
        q_positions=tokens(t) if q is None else q,
        kv_positions=tokens(s) if k is None else k,
    )
    parts = layout.parts * (1 if mesh is None else n)
    shards = n if mesh is None else 1
    blocking = choose_blocking(problem, block_q, block_k, parts, shards, kernel=kernel)
    ring = Rotation(axis, n, ahead, behind, unroll)
    return fold_problem(problem, blocking, ring, manual, fused=fused, kernel=kernel)


@AttentionRegistry.register
class Ring(AbstractExact):
    """Exact attention over sequences that are sharded over devices.

    Each device keeps its queries. Keys and values travel around the ring, in their own dtype and
    with their own number of heads, while the previous ones are attended to; in a gradient, so do
    the gradients of keys and values. Memory per device does not depend on the number of devices.

    There are two ways to call it:

    - With whole arrays, in or out of `jax.jit`. The mesh is that of the context (`jax.set_mesh`)
        or of the metadata. Only the sequence axis is made manual: batch and heads stay sharded
        over the other axes as they are.
    - Inside your own `jax.shard_map` that is manual over the axis, with each device's piece. What
        varies with query and key (a bias, a `Dense` mask) then holds the device's rows and the
        columns of all devices, in the order of the layout. Dropout draws the bits of the whole
        arrays if batch and heads are sharded over the manual axes that `metadata.partition_axis`
        names. Indices of batch and head in your own masks and scores are the device's.

    Without a mesh and without an `axis_name` it is `Blockwise`.

    **Arguments:**

    - `metadata`: as for `Blockwise`, and `sequence_axis_name`, `mesh` and `scan_ring_attention`
        (False writes the hops out instead of looping over them).
    - `axis_name`: the mesh axis, default `metadata.sequence_axis_name`.
    - `mesh`: default `metadata.mesh`; the mesh of the context comes first.
    - `layout`: which tokens each device holds, [`eqattn.Contiguous`][] or [`eqattn.Zigzag`][].
    - `precision`, `fused_backward`: as for `Blockwise`.

    **Raises:** `ValueError` when called, if the mesh has no such axis, if the layout does not
    divide the tokens, or if an axis is named and there is no mesh.

    ??? cite "Reference"

        Liu, Zaharia and Abbeel, *Ring Attention with Blockwise Transformers for Near-Infinite
        Context*, 2023 (arXiv:2310.01889).
    """

    metadata: AttentionMetadata
    axis_name: str | None = eqx.field(static=True, default=None)
    mesh: Any = eqx.field(static=True, default=None)
    layout: AbstractRingLayout = eqx.field(static=True, default=Contiguous())
    precision: Any = eqx.field(static=True, default=None)
    fused_backward: bool = eqx.field(static=True, default=True)

    pallas_lowerings: ClassVar[tuple[str, ...]] = ("tpu",)

    @classmethod
    def get_impl_name(cls) -> str:
        return "ring"

    def fold(self, problem: Problem) -> tuple[Carry, Any]:
        place = self._place()
        if place is not None and place.explicit:
            return self._without_explicit_axes(problem, place)
        if problem.seed is not None and place is not None and place.mesh is None:
            problem = dataclasses.replace(
                problem, seed=self._seed(problem.seed, problem, place.axis)
            )
        kernel = self.kernel(problem)
        options = dict(
            block_q=self.metadata.blocksize_q,
            block_k=self.metadata.blocksize_k,
            fused=self.fused_backward,
            kernel=kernel,
            manual=self.manual(problem, kernel, place and place.manual),
        )
        if place is None:
            return fold_blocks(problem, **options), None
        unroll = not self.metadata.scan_ring_attention
        return _fold(problem, place=place, layout=self.layout, unroll=unroll, **options), None

    def _without_explicit_axes(self, problem: Problem, place: _Place):
        """For arrays that are not typed by the mesh of the context, whose axes are explicit."""
        arrays, static = eqx.partition(problem, eqx.is_array)
        inner: Any = auto_axes(
            lambda arrays: self.fold(eqx.combine(arrays, static)),
            axes=place.explicit,
            out_sharding=P(None, place.axis),
        )
        return inner(arrays)

    def _seed(self, seed: Array, problem: Problem, axis: str) -> Array:
        """The seed with the indices of this device's first batch element and head, so that the
        bits of the dropout are those of the whole arrays.
        """
        query, mesh = problem.query, jax.sharding.get_abstract_mesh()
        manual = {a for a, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Manual}
        if axis in varying_axes(query):  # JAX knows which axes shard the query
            manual &= varying_axes(query)
        where = self.metadata.partition_axis
        starts = []
        for names, size in ((where.batch_axis, query.shape[0]), (where.head_axis, query.shape[2])):
            index = jnp.uint32(0)
            for name in (names,) if isinstance(names, str) else names or ():
                if name in manual:
                    index = index * mesh.shape[name] + lax.axis_index(name).astype(jnp.uint32)
            starts.append(index * size)
        return jnp.concatenate([seed, jnp.stack(starts)])

    def key_shards(self) -> int:
        place = self._place()
        return place.size if place is not None and place.mesh is None else 1

    def _place(self) -> _Place | None:
        """None where one device holds the whole sequence."""
        axis = self.axis_name or self.metadata.sequence_axis_name
        context = jax.sharding.get_abstract_mesh()
        mesh = self.metadata.mesh if self.mesh is None else self.mesh
        mesh = (mesh and automatic(mesh)) if context.empty else context
        if mesh is None:
            if self.axis_name is None:
                return None
            raise ValueError(
                f"axis_name={axis!r}: there is no mesh. Call under jax.set_mesh, give the "
                "metadata a mesh, or call inside jax.shard_map; Blockwise(metadata) runs on one "
                "device."
            )
        if axis not in mesh.shape:
            raise ValueError(
                f"The mesh has axes {tuple(mesh.axis_names)} and no {axis!r}; name the axis that "
                "shards the tokens by axis_name= or AttentionMetadata(sequence_axis_name=), or "
                "use Blockwise(metadata)."
            )
        if mesh.shape[axis] == 1:
            return None
        manual = dict(zip(mesh.axis_names, mesh.axis_types))[axis] == AxisType.Manual
        return _Place(axis, mesh.shape[axis], None if manual else mesh)
