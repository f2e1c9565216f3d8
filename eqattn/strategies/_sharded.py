"""What strategies over sharded sequences have in common: where they are, and one fold there."""

import abc
import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, auto_axes, AxisType, Mesh, PartitionSpec as P
from jaxtyping import Array, Int

from .._carry import Carry
from .._config.partition import names_of
from .._jax import varying_axes
from .._problem.mesh import current_mesh, ManualAxes
from .._problem.problem import Problem
from .._ring.layout import AbstractRingLayout
from ..kernels import BACKENDS
from ._fold_strategy import AbstractFoldStrategy


class Axes(NamedTuple):
    """The axis of a ring, and the axis over which tokens are exchanged for heads; whether there
    must be a mesh that has them; and which tokens each place of the ring holds.
    """

    axis: str | None
    head_axis: str | None
    needed: bool
    layout: AbstractRingLayout


class SequenceSharding(NamedTuple):
    """Where a sequence is sharded: over a ring, inside over devices that exchange tokens for heads
    (each None: over no axis), and the mesh that these axes are automatic in (None: manual), where
    other axes may cut the heads into `head_shards`.
    """

    axis: str | None
    size: int
    head_axis: str | None
    head_size: int
    mesh: Any
    layout: AbstractRingLayout
    head_shards: int = 1

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(a for a in (self.axis, self.head_axis) if a is not None)

    @property
    def manual(self) -> ManualAxes | None:
        if self.mesh is None:
            return None
        tokens, group = (() if a is None else (a,) for a in (self.axis, self.head_axis))
        return ManualAxes(self.mesh, tokens=tokens, group=group)

    def tokens(self, length: int) -> Int[Array, "1 n"]:
        """The positions of this place's tokens, of which an array here holds `length`; of the
        tokens of all places where the axes are automatic.
        """
        if self.mesh is not None:
            return self.layout.tokens(length, self.size)
        length *= self.head_size
        if self.axis is None:
            return self.layout.tokens(length, self.size)
        return self.layout.own_tokens(length, self.size, self.axis)

    def array_tokens(self, length: int) -> Int[Array, " length"] | None:
        """The positions of the tokens of an array here; None where they are in order."""
        if self.mesh is not None and self.layout.parts == 1:
            return None
        tokens = self.tokens(length)[0]
        if self.mesh is not None or self.head_axis is None:
            return tokens
        return lax.dynamic_slice_in_dim(tokens, lax.axis_index(self.head_axis) * length, length)

    @property
    def sharers(self) -> int:
        """In how many shares the heads are cut."""
        return self.head_size * self.head_shards

    @property
    def devices(self) -> int:
        return self.size * self.head_size

    @property
    def explicit(self) -> tuple[str, ...]:
        return () if self.mesh is None else tuple(self.mesh.explicit_axes)


def _check(problem: Problem, place: SequenceSharding) -> None:
    """Raises, with the remedy, for sizes that cannot be spread so."""
    t, s, heads, _ = problem.sizes
    inside = place.mesh is None
    parts = place.size * math.lcm(place.layout.parts, place.head_size)
    for name, x, least in (("query", problem.query, place.head_size), ("key", problem.key, 2)):
        if inside and x.shape[1] == 1 < least:
            raise ValueError(
                f"{name} {x.shape} [b, tokens, heads, dim] has one token on each of "
                f"{place.devices} devices; in your own shard_map it needs two or more."
            )
    if heads % place.head_size:
        remedy = f"a ring over it, Ring(metadata, axis_name={place.head_axis!r}), needs no heads"
        raise ValueError(
            f"The {heads} heads of query {problem.query.shape} [b, t, h, d] are not a multiple of "
            f"the {place.head_size} devices of axis {place.head_axis!r} that would share them; "
            f"{remedy}, and Ring(metadata, axis_name=, head_axis=) splits the devices between both."
        )
    for length in (t, s):
        if place.layout.parts > 1 and not inside and length % parts:
            raise ValueError(
                f"{length} tokens are not equal pieces for {place.devices} devices "
                f"({type(place.layout).__name__}); pad them to a multiple of {parts}."
            )


class AbstractSharded(AbstractFoldStrategy):
    """Exact attention over sharded sequences; a subclass says over which `_axes`."""

    mesh: eqx.AbstractVar[Any]
    fused_backward: eqx.AbstractVar[bool]

    pallas_lowerings: ClassVar[tuple[str, ...]] = BACKENDS

    def __check_init__(self) -> None:
        if self.mesh is not None and not isinstance(self.mesh, Mesh | AbstractMesh):
            raise TypeError(f"mesh is a Mesh, an AbstractMesh or None, got {self.mesh!r}.")

    @abc.abstractmethod
    def _axes(self) -> Axes:
        """Where the tokens are."""

    def token_positions(self, length: int) -> Int[Array, " length"] | None:
        place = self._place()
        return None if place is None else place.array_tokens(length)

    def fold(self, problem: Problem) -> tuple[Carry, Any]:
        from .._problem.exchange import with_enough_heads
        from ._fold import fold_on_device, fold_sharded

        place, lowering = self._place(), self.lowering(problem)
        if place is not None and place.explicit:
            return self._without_explicit_axes(problem, place)
        if place is not None:
            _check(problem, place)
            if place.head_size > 1:
                uneven = problem.sizes[2] % place.sharers
                problem = with_enough_heads(problem, place.head_size if uneven else place.sharers)
        options: dict[str, Any] = dict(
            block_q=self.metadata.blocksize_q,
            block_k=self.metadata.blocksize_k,
            fused=self.fused_backward,
            lowering=lowering,
            manual=self.manual(problem, lowering, place and place.manual),
        )
        if place is None:
            return fold_on_device(problem, **options), None
        if problem.seed is not None and place.mesh is None:
            seed = self._seed(problem.seed, problem, place.axes)
            problem = dataclasses.replace(problem, seed=seed)
        unroll = not self.metadata.scan_ring_attention
        return fold_sharded(problem, place=place, unroll=unroll, **options), None

    def _without_explicit_axes(self, problem: Problem, place: SequenceSharding):
        """For arrays that are not typed by the mesh of the context, whose axes are explicit."""
        arrays, static = eqx.partition(problem, eqx.is_array)
        inner: Any = auto_axes(
            lambda arrays: self.fold(eqx.combine(arrays, static)),
            axes=place.explicit,
            out_sharding=P(None, place.axes),
        )
        return inner(arrays)

    def _seed(self, seed: Array, problem: Problem, axes: tuple[str, ...]) -> Array:
        """The seed with the indices of this device's first batch element and head, so that the
        bits of the dropout are those of the whole arrays.
        """
        query, mesh = problem.query, jax.sharding.get_abstract_mesh()
        manual = {a for a, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Manual}
        if set(axes) & varying_axes(query):  # JAX knows which axes shard the query
            manual &= varying_axes(query)
        manual -= set(axes)
        where = self.metadata.partition_axis
        starts = []
        for names, size in ((where.batch_axis, query.shape[0]), (where.head_axis, query.shape[2])):
            index = jnp.uint32(0)
            for name in names_of(names):
                if name in manual:
                    index = index * mesh.shape[name] + lax.axis_index(name).astype(jnp.uint32)
            starts.append(index * size)
        return jnp.concatenate([seed, jnp.stack(starts)])

    def key_shards(self) -> int:
        place = self._place()
        return place.devices if place is not None and place.mesh is None else 1

    def _place(self) -> SequenceSharding | None:
        """None where one device holds the whole sequence."""
        axis, head_axis, needed, layout = self._axes()
        mesh = current_mesh(self.metadata.mesh if self.mesh is None else self.mesh)
        named = [a for a in (axis, head_axis) if a is not None]
        if mesh is None:
            if not needed:
                return None
            raise ValueError(
                f"Axes {tuple(named)} are named and there is no mesh. Call under jax.set_mesh, "
                "give the metadata a mesh, or call inside jax.shard_map; Blockwise(metadata) runs "
                "on one device."
            )
        for name in named:
            if name not in mesh.shape:
                raise ValueError(
                    f"The mesh has axes {tuple(mesh.axis_names)} and no {name!r}; name those that "
                    "shard the tokens by axis_name= or AttentionMetadata(sequence_axis_name=), "
                    "and by head_axis= of Ring, or use Blockwise(metadata)."
                )
        sizes = [1 if a is None else mesh.shape[a] for a in (axis, head_axis)]
        axis, head_axis = (a if n > 1 else None for a, n in zip((axis, head_axis), sizes))
        if axis is None and head_axis is None:
            return None
        kinds = dict(zip(mesh.axis_names, mesh.axis_types))
        manual = {a: kinds[a] == AxisType.Manual for a in (axis, head_axis) if a is not None}
        if len({*manual.values()}) > 1:
            raise ValueError(
                f"One of the axes {tuple(manual)} is manual and the other is not; make your "
                "jax.shard_map manual over both, or over neither."
            )
        shards = self._head_shards(mesh, named)
        place = SequenceSharding(axis, sizes[0], head_axis, sizes[1], mesh, layout, shards)
        return place._replace(mesh=None, head_shards=1) if any(manual.values()) else place

    def _head_shards(self, mesh: Any, axes: list[str]) -> int:
        """How many shards of the heads the other automatic axes make."""
        names = names_of(self.metadata.partition_axis.head_axis)
        automatic = [a for a, kind in zip(mesh.axis_names, mesh.axis_types)
                     if kind != AxisType.Manual and a not in axes]  # fmt: skip
        return math.prod(mesh.shape[a] for a in names if a in automatic)
