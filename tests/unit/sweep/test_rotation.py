"""A sweep around a ring is the sweep of all columns on one device, whatever it sums and however
far its columns travel.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from eqattn._sweep.grid import BlockGrid, COL, EMPTY, FULL, HEAD, PARTIAL, ROW
from eqattn._sweep.ring import Rotation
from eqattn._sweep.sweep import sweep, table_per_hop


ROWS, COLUMNS = 3, 2  # of each device
ROUTES = [(1, 0, 0), (3, 2, 0), (5, 1, 3), (4, 0, 3)]
LARGE = (2**10, 2**10)  # blocks beyond what is vectorised over the batch


def in_ring(n, fn, args, in_specs, out_specs):
    kind = (AxisType.Auto,)
    mesh = jax.make_mesh((n,), ("sp",), devices=jax.devices()[:n], axis_types=kind)
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    return jax.jit(mapped)(*args)


def numbers(n, *lead):
    rng = np.random.default_rng(n)
    rows, columns = rng.normal(size=(*lead, n * ROWS)), rng.normal(size=(*lead, n * COLUMNS))
    return rows.astype(np.float32), columns.astype(np.float32)


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n, ahead, behind, unroll", [(*ROUTES[1], False), (*ROUTES[3], True)])
def test_sums_around_a_ring(n, ahead, behind, unroll):
    """Sums of rows stay, those of columns come home with what every device added to them."""
    rows, columns = numbers(n)
    ring = Rotation("sp", n, ahead, behind, unroll=unroll)
    f = lambda r, c: [jnp.sin(r + 2 * c), jnp.cos(3 * r - c)]

    def run(r, c):
        layout = BlockGrid((1, 1, ROWS, COLUMNS), (1, 1), (), ring=ring)
        return tuple(sweep({FULL: f}, [r, c], [(ROW,), (COL,)], [(ROW,), (COL,)], layout=layout))

    of_rows, of_columns = in_ring(n, run, (rows, columns), P("sp"), P("sp"))
    one, two = (np.asarray(x) for x in f(rows[:, None], columns[None]))
    close(of_rows, one.sum(1))
    close(of_columns, two.sum(0))


@pytest.mark.parametrize("ahead, behind", [(1, 0), (0, 1), (2, 1)])
def test_columns_travel_to_the_next_device_or_the_one_before(ahead, behind):
    """A route that is no whole turn shows which devices the columns came from."""
    n = 5
    rows, columns = numbers(n)
    layout = BlockGrid((1, 1, ROWS, COLUMNS), (1, 1), (), ring=Rotation("sp", n, ahead, behind))
    f = {FULL: lambda r, c: [r * c]}
    run = lambda r, c: sweep(f, [r, c], [(ROW,), (COL,)], [(ROW,)], layout=layout)[0]
    got = in_ring(n, run, (rows, columns), P("sp"), P("sp"))
    of_device = columns.reshape(n, COLUMNS).sum(1)
    met = sum(np.roll(of_device, shift) for shift in range(-behind, ahead + 1))
    close(got, rows * met.repeat(ROWS))


@pytest.mark.parametrize("n, ahead, behind, unroll", [(4, 3, 0, False), (5, 2, 2, True)])
def test_gradients_around_a_ring(n, ahead, behind, unroll):
    """The cotangents of columns are summed on their way, once per hop."""
    rows, columns = numbers(n)
    ring = Rotation("sp", n, ahead, behind, unroll=unroll)

    def run(r, c):
        layout = BlockGrid((1, 1, ROWS, COLUMNS), (1, 1), (), ring=ring, fused=unroll)
        f = lambda r, c: [jnp.sin(r * c)]
        (out,) = sweep({FULL: f}, [r, c], [(ROW,), (COL,)], [(ROW,)], layout=layout)
        return out

    pulled = lambda r, c: jax.vjp(run, r, c)[1](jnp.cos(r))
    of_rows, of_columns = in_ring(n, pulled, (rows, columns), P("sp"), P("sp"))
    r, c = rows[:, None].astype(float), columns[None].astype(float)
    slope = np.cos(r) * np.cos(r * c)
    close(of_rows, (slope * c).sum(1))
    close(of_columns, (slope * r).sum(0))


def test_unrolled_hops_hold_no_loop():
    n, (rows, columns) = 4, numbers(4)

    def program(unroll):
        ring = Rotation("sp", n, n - 1, 0, unroll=unroll)
        layout = BlockGrid((1, 1, ROWS, COLUMNS), (1, 1), (), ring=ring)

        def run(r, c):
            f = lambda r, c: [r * c]
            return sweep({FULL: f}, [r, c], [(ROW,), (COL,)], [(ROW,)], layout=layout)[0]

        mesh = jax.make_mesh((n,), ("sp",), devices=jax.devices()[:n], axis_types=(AxisType.Auto,))
        mapped = jax.shard_map(run, mesh=mesh, in_specs=P("sp"), out_specs=P("sp"))
        return jax.jit(mapped).lower(rows, columns).as_text().count("collective_permute")

    assert program(unroll=True) == n - 1  # each hop's own
    assert program(unroll=False) == 2  # that of the first hop, and that of the loop


def seen(q, k):
    """The class of every block, of which each is one pair."""
    return jnp.where(q[:, None] > k[None], FULL, EMPTY).astype(jnp.int8)


def test_tables_of_hops_under_vmap():
    """What maps over a ring gets an axis of its own for each table, also where the grid has batch
    axes of one: a table was traced for the axes that there were.
    """
    n, many = 3, 4
    rng = np.random.default_rng(0)
    q = rng.integers(0, 9, (many, n * ROWS)).astype(np.int32)
    k = rng.integers(0, 9, (many, n * COLUMNS)).astype(np.int32)
    shared = rng.integers(0, 9, n * ROWS).astype(np.int32)

    def one(q, k):
        ring = Rotation("sp", n, n - 1, 0)
        axes = [(ROW,), (COL,)]
        ring, consts = table_per_hop(ring, seen, [q, k], axes, (0, 1), (1, 1, ROWS, COLUMNS))
        assert not consts
        layout = BlockGrid((1, 1, ROWS, COLUMNS), LARGE, (), ring=ring)
        f = lambda q, k: [(k + 1).astype(jnp.float32)]
        twice = lambda q, k: [2 * (k + 1).astype(jnp.float32)]
        return sweep({FULL: f, PARTIAL: twice}, [q, k], axes, [(ROW,)], layout=layout)[0]

    def want(q):
        return np.where(q[..., None] > k[:, None], k[:, None] + 1, 0).sum(-1)

    tokens = P(None, "sp")
    got = in_ring(n, jax.vmap(one), (q, k), (tokens, tokens), tokens)
    np.testing.assert_array_equal(got, want(q))
    got = in_ring(n, jax.vmap(one, (None, 0)), (shared, k), (P("sp"), tokens), tokens)
    np.testing.assert_array_equal(got, want(shared))


def test_a_batch_axis_of_one_that_an_operand_has():
    """In a ring, `jax.vmap` must not take the place of a batch axis that a table may be read on."""
    n, many = 2, 3
    rng = np.random.default_rng(1)
    q = rng.integers(0, 9, (many, 1, n * ROWS)).astype(np.int32)
    k = rng.integers(0, 9, (many, n * COLUMNS)).astype(np.int32)

    def classify(q, k):
        return jnp.where(q[:, :, None] > k[None, None], FULL, EMPTY).astype(jnp.int8)[:, None]

    def one(q, k):
        ring = Rotation("sp", n, n - 1, 0)
        axes = [(-4, ROW), (COL,)]
        ring, _ = table_per_hop(ring, classify, [q, k], axes, (0, 1), (1, 1, ROWS, COLUMNS))
        layout = BlockGrid((1, 1, ROWS, COLUMNS), LARGE, (), ring=ring)
        f = lambda q, k: [jnp.ones((), jnp.float32)]
        return sweep({FULL: f}, [q, k], axes, [(-4, ROW)], layout=layout)[0]

    specs = P(None, None, "sp"), P(None, "sp")
    got = in_ring(n, jax.vmap(one), (q, k), specs, specs[0])
    np.testing.assert_array_equal(got, (q[..., None] > k[:, None, None]).sum(-1))


def test_each_class_keeps_what_it_closes_over():
    """Arrays that block functions close over become operands, of one class after the other."""
    table = jnp.array([[FULL, PARTIAL, EMPTY], [PARTIAL, PARTIAL, FULL]], jnp.int8)
    of_full, of_partial = jnp.arange(4.0), jnp.full((2,), 10.0)
    more = jnp.float32(0.5)
    layout = BlockGrid((1, 1, 2, 3), (1, 1), (), (ROW, COL))

    @jax.jit
    def run(of_full, of_partial, more):
        fns = {
            FULL: lambda: [of_full.sum() + more],
            PARTIAL: lambda: [of_partial.prod() * more],
        }
        return sweep(fns, [], [], [(ROW,)], layout=layout, table=table)[0]

    np.testing.assert_allclose(run(of_full, of_partial, more), [6.5 + 50, 50 + 50 + 6.5])
    slopes = jax.grad(lambda *xs: run(*xs).sum(), (0, 1, 2))(of_full, of_partial, more)
    np.testing.assert_allclose(slopes[0], [2.0] * 4)
    np.testing.assert_allclose(slopes[1], [15.0] * 2)
    np.testing.assert_allclose(slopes[2], 2 + 3 * 100)


def test_axes_of_heads_stay_in_their_place():
    """Outputs that lack an axis of the grid sum over it, around a ring as well."""
    n, (rows, columns) = 3, numbers(3, 2)
    ring = Rotation("sp", n, 1, 1)

    def run(r, c):
        layout = BlockGrid((1, 2, ROWS, COLUMNS), (1, 1), (), ring=ring)
        f = lambda r, c: [r * c, r + c]
        axes = [(HEAD, ROW), (HEAD, COL)]
        return tuple(sweep({FULL: f}, [r, c], axes, [(ROW,), (HEAD, COL)], layout=layout))

    tokens = P(None, "sp")
    of_rows, of_columns = in_ring(n, run, (rows, columns), (tokens, tokens), (P("sp"), tokens))
    close(of_rows, np.einsum("hr,hc->r", rows, columns))
    close(of_columns, (rows[:, :, None] + columns[:, None]).sum(1))
