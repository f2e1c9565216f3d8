"""The base of strategies over sharded sequences: it finds out how tokens are sharded, and folds."""

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
from .._config.partition import check_axis_name
from .._jax import names_of, varying_axes
from .._problem.mesh import current_mesh, ManualAxes, types_are_checked
from .._problem.problem import Problem
from .._ring.layout import AbstractRingLayout, Contiguous
from ..kernels import BACKENDS
from ..masks._base import AbstractMask, leaf_terms
from ._fold_strategy import AbstractFoldStrategy


class Axes(NamedTuple):
    """The mesh axes that a strategy names for its tokens."""

    axis: str | None  # the axis of the ring
    head_axis: str | None  # the axis over which tokens are exchanged for heads
    needed: bool  # whether a call without a mesh raises, instead of running on one device
    layout: AbstractRingLayout  # which tokens each place of the ring holds
    gathers: bool = False  # whether keys and values are gathered over `axis`, instead of rotating


class SequenceSharding(NamedTuple):
    """How a sequence is sharded: over the places of a ring, and within each place over devices that
    exchange tokens for heads.
    """

    axis: str | None  # the axis of the ring; None if there is none
    size: int  # how many places the ring has
    head_axis: str | None  # the axis of the exchange; None if there is none
    head_size: int  # how many devices exchange tokens for heads
    mesh: Any  # the mesh in which these axes are automatic; None if they are manual
    layout: AbstractRingLayout  # which tokens each place of the ring holds
    gathers: bool  # whether keys and values are gathered over `axis`, instead of rotating
    head_shards: int = 1  # how many ways other automatic axes shard the heads

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
        """The positions of the tokens at this place of the ring, or at all places if the axes are
        automatic. `length` is how many tokens an array has here.
        """
        if self.mesh is not None:
            return self.layout.tokens(length, self.size)
        length *= self.head_size
        if self.axis is None:
            return self.layout.tokens(length, self.size)
        return self.layout.own_tokens(length, self.size, self.axis)

    def array_tokens(self, length: int) -> Int[Array, " length"] | None:
        """The positions of the tokens of an array here; None if they are `0, 1, ...`."""
        if self.mesh is not None and self.layout.in_order(self.size):
            return None
        tokens = self.tokens(length)[0]
        if self.mesh is not None or self.head_axis is None:
            return tokens
        return lax.dynamic_slice_in_dim(tokens, lax.axis_index(self.head_axis) * length, length)

    @property
    def sharers(self) -> int:
        """How many ways heads are sharded during attention."""
        return self.head_size * self.head_shards

    @property
    def devices(self) -> int:
        """How many devices shard the tokens."""
        return self.size * self.head_size

    @property
    def explicit(self) -> tuple[str, ...]:
        return () if self.mesh is None else tuple(self.mesh.explicit_axes)


def _whole(layout: AbstractRingLayout, mesh: Any) -> None:
    """The place of a sequence that one device holds, which is none.

    Without a mesh, nobody knows for how many devices the tokens of an array were put into order.
    So only tokens that stay where they are for any number are known to be in order.

    **Raises:** `ValueError` for a layout whose tokens may be in another order.
    """
    if layout.in_order(1) and (mesh is not None or isinstance(layout, Contiguous)):
        return
    raise ValueError(
        f"layout={layout!r} has tokens in another order than 0, 1, ..., by the devices of its "
        "mesh, and there is no mesh of several: call under jax.set_mesh, give the metadata a mesh, "
        "or call inside jax.shard_map. Tokens that stay in their order are layout=Contiguous()."
    )


def _check_whole_blocks(problem: Problem, place: SequenceSharding, block_k: int) -> None:
    """**Raises:** `ValueError`, with the remedy, if a device has a part of a block of keys."""
    if problem.sizes[1] % (block_k * (1 if place.mesh is None else place.devices)):
        raise ValueError(
            f"bitwise=True: the keys {problem.key.shape} [b, s, heads, dim] are not whole blocks "
            f"of {block_k} on each of {place.devices} devices; pad them, or give the metadata a "
            "blocksize_k that divides them."
        )


def _check(problem: Problem, place: SequenceSharding) -> None:
    """**Raises:** `ValueError`, with the remedy, for sizes that cannot be sharded like this."""
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
        if not place.layout.in_order(place.size) and not inside and length % parts:
            raise ValueError(
                f"{length} tokens are not equal pieces for {place.devices} devices "
                f"({type(place.layout).__name__}); pad them to a multiple of {parts}."
            )


def _with_shared_heads(problem: Problem, place: SequenceSharding | None) -> Problem:
    """The problem with as many key/value heads as the devices need that exchange tokens for heads.

    **Raises:** what `_check` raises.
    """
    from .._problem.shards import with_enough_heads

    if place is None:
        return problem
    _check(problem, place)
    if place.head_size == 1:
        return problem
    uneven = problem.sizes[2] % place.sharers
    return with_enough_heads(problem, place.head_size if uneven else place.sharers)


class AbstractSharded(AbstractFoldStrategy):
    """Exact attention over sharded sequences. A subclass says over which mesh axes, by `_axes`."""

    mesh: eqx.AbstractVar[Any]
    fused_backward: eqx.AbstractVar[bool]

    pallas_lowerings: ClassVar[tuple[str, ...]] = BACKENDS

    def __check_init__(self) -> None:
        for field in ("axis_name", "head_axis"):
            check_axis_name(field, getattr(self, field, None))
        if self.mesh is not None and not isinstance(self.mesh, Mesh | AbstractMesh):
            raise TypeError(f"mesh is a Mesh, an AbstractMesh or None, got {self.mesh!r}.")

    @abc.abstractmethod
    def _axes(self) -> Axes:
        """The mesh axes over which the tokens are sharded."""

    def token_positions(self, length: int) -> Int[Array, " length"] | None:
        place = self._place()
        return None if place is None else place.array_tokens(length)

    def fold(self, problem: Problem) -> tuple[Carry, Any]:
        from ._fold import fold_on_device, fold_sharded

        place, lowering = self._place(), self.lowering(problem)
        if place is not None and place.explicit:
            return self._without_explicit_axes(self.fold, problem, place)
        problem = _with_shared_heads(problem, place)
        gathers = place is not None and place.gathers and not types_are_checked(problem)
        by_hand = self.fixed or gathers
        block_q, block_k = self.block_sizes()
        options: dict[str, Any] = dict(
            block_q=block_q,
            block_k=block_k,
            fused=self.fused_backward,
            lowering=lowering,
            manual=self.manual(problem, lowering, place and place.manual, by_hand),
            fixed=self.fixed,
        )
        if place is None:
            return fold_on_device(problem, **options), None
        if self.fixed and block_k is not None:
            _check_whole_blocks(problem, place, block_k)
        if problem.seed is not None and place.mesh is None:
            seed = self._seed(problem.seed, problem, place.axes)
            problem = dataclasses.replace(problem, seed=seed)
        unroll = not self.metadata.scan_ring_attention
        return fold_sharded(problem, place=place, unroll=unroll, **options), None

    def top(self, problem: Problem, count: int) -> tuple[Array, Array]:
        from ._fold import top_on_device, top_sharded

        place = self._place()
        if place is not None and place.explicit:
            return self._without_explicit_axes(lambda x: self.top(x, count), problem, place)
        problem = _with_shared_heads(problem, place)
        options: dict[str, Any] = dict(
            count=count, block_q=self.metadata.blocksize_q, block_k=self.metadata.blocksize_k
        )
        if place is None:
            return top_on_device(problem, in_place=False, **options)
        options["unroll"] = not self.metadata.scan_ring_attention
        # Blocks of keys visit the devices, also where attention would gather them.
        place = place._replace(gathers=False)
        return top_sharded(problem, place=place, manual=place.manual, **options)

    def _without_explicit_axes(self, run: Any, problem: Problem, place: SequenceSharding) -> Any:
        """Folds where the compiler propagates shardings. A mesh of the context with explicit axes
        needs this, as the arrays of a problem have no shardings in their types.
        """
        arrays, static = eqx.partition(problem, eqx.is_array)
        uneven = problem.sizes[0] % place.devices
        kept = () if uneven else tuple(a for a in place.axes if a in place.explicit)
        inner: Any = auto_axes(
            lambda arrays: run(eqx.combine(arrays, static)),
            axes=place.explicit,
            out_sharding=P(None, kept or None),
        )
        return inner(arrays)

    def _seed(self, seed: Array, problem: Problem, axes: tuple[str, ...]) -> Array:
        """The seed, followed by the indices of this device's first batch element and head in the
        whole arrays. Dropout then draws the bits of the whole arrays, as its counter contains
        these indices.
        """
        query, mesh = problem.query, jax.sharding.get_abstract_mesh()
        manual = {a for a, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Manual}
        # If JAX tracks over which manual axes the query varies, only those can shard it.
        if set(axes) & varying_axes(query):
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

    def check_lists(self, mask: AbstractMask | None) -> None:
        super().check_lists(mask)
        lists = [type(term).__name__ for term in leaf_terms(mask) if term.selects]
        if not lists or (place := self._place()) is None:
            return
        raise ValueError(
            f"A {lists[0]} lists keys that may lie on any of the {place.devices} devices of axes "
            f"{place.axes}, which shard the tokens; gather the keys first. Take Blockwise(metadata)"
            " and, in your own jax.shard_map, give jax.lax.all_gather(x, axis, axis=1, tiled=True)"
            " of key_ and value, and q_positions. Ragged(metadata, axis_name=) shards keys alone."
        )

    def shards_tokens(self) -> bool:
        return self._place() is not None

    def key_shards(self) -> int:
        place = self._place()
        return place.devices if place is not None and place.mesh is None else 1

    def _place(self) -> SequenceSharding | None:
        """How the sequence is sharded here; None if one device holds all of it."""
        axis, head_axis, needed, layout, gathers = self._axes()
        mesh = current_mesh(self.metadata.mesh if self.mesh is None else self.mesh)
        named = [a for a in (axis, head_axis) if a is not None]
        if mesh is None:
            if not needed:
                return _whole(layout, mesh)
            raise ValueError(
                f"Axes {tuple(named)} are named, by axis_name= or the metadata, and there is no "
                "mesh. Call under jax.set_mesh, give the metadata a mesh, or call inside "
                "jax.shard_map; Blockwise(metadata) runs on one device."
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
            return _whole(layout, mesh)
        kinds = dict(zip(mesh.axis_names, mesh.axis_types))
        manual = {a: kinds[a] == AxisType.Manual for a in (axis, head_axis) if a is not None}
        if len({*manual.values()}) > 1:
            raise ValueError(
                f"One of the axes {tuple(manual)} is manual and the other is not; make your "
                "jax.shard_map manual over both, or over neither."
            )
        shards = self._head_shards(mesh, named)
        tokens = (axis, sizes[0], head_axis, sizes[1], mesh, layout, gathers)
        place = SequenceSharding(*tokens, shards)
        return place._replace(mesh=None, head_shards=1) if any(manual.values()) else place

    def _head_shards(self, mesh: Any, axes: list[str]) -> int:
        """How many ways automatic axes other than `axes` shard the heads."""
        names = names_of(self.metadata.partition_axis.head_axis)
        automatic = [a for a, kind in zip(mesh.axis_names, mesh.axis_types)
                     if kind != AxisType.Manual and a not in axes]  # fmt: skip
        return math.prod(mesh.shape[a] for a in names if a in automatic)
