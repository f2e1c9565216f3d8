"""`eqattn.viz`: what is drawn is what was computed."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqattn
from eqattn import (
    attention,
    AttentionMetadata,
    AttentionOutput,
    Blockwise,
    Causal,
    Contiguous,
    Dense,
    KeyPadding,
    MaskFn,
    ring_plan,
    Segments,
    SlidingWindow,
    Zigzag,
)


plt = pytest.importorskip("matplotlib.pyplot")

from eqattn import viz  # noqa: E402


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def image(ax):
    (drawn,) = ax.images
    return np.asarray(drawn.get_array())


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def by_head(b, h, q, k):
    return (k <= q) & (q - k < 8 * 2**h)


def test_pairs():
    mask = Causal() & SlidingWindow(5, 0)
    ax = viz.plot_mask(mask, 24, 20)
    np.testing.assert_array_equal(image(ax), mask.as_array(24, 20)[0])
    assert ax.get_xlabel() == "key position (tokens)" and ax.get_xlim() == (0, 20)
    assert ax.get_ylabel() == "query position (tokens)" and ax.get_ylim() == (24, 0)
    assert ax.get_title() == "Causal() & SlidingWindow(left=5, right=0)"
    share = float(mask.as_array(24, 20).mean())
    assert legend(ax) == [f"visible {share:.0%}", "hidden"]


@pytest.mark.parametrize("blocks", [(8, 4), (5, 7), (8, None)])
def test_pairs_in_blocks(blocks):
    mask = MaskFn(by_head)
    block_q, block_k = blocks
    ax = viz.plot_mask(mask, 24, 20, block_q=block_q, block_k=block_k, heads=2, head=1)
    visible = np.asarray(mask.as_array(24, 20, heads=2)[1])
    drawn = image(ax)
    assert ((drawn >= 2) == visible).all()
    skipped = total = 0
    for rows in np.split(np.arange(24), range(block_q, 24, block_q)):
        for columns in np.split(np.arange(20), range(block_k or 20, 20, block_k or 20)):
            block, pairs = drawn[np.ix_(rows, columns)], visible[np.ix_(rows, columns)]
            total, skipped = total + 1, skipped + (not pairs.any())
            assert (block == 0).all() == (not pairs.any())
            assert (block == 3).all() == pairs.all()
    assert legend(ax)[-1].startswith("skipped: ")
    assert float(legend(ax)[-1].split()[1].rstrip("%")) == pytest.approx(
        100 * skipped / total, abs=0.5
    )


def test_blocks():
    mask = Causal() & Segments(jnp.repeat(jnp.arange(3), jnp.array([40, 60, 28])))
    ax = viz.plot_blocks(mask, 128, block_q=8, block_k=16)
    shares = mask.sparsity(128, 128, block_q=8, block_k=16)
    table = image(ax)
    assert table.shape == (16, 8) and np.mean(table == 0) == shares.empty > 0.5
    assert np.mean(table == 1) == shares.partial and np.mean(table == 2) == shares.full
    names = [("full", shares.full), ("partial", shares.partial), ("skipped", shares.empty)]
    for text, (name, share) in zip(legend(ax), names, strict=True):
        assert text.startswith(name) and abs(float(text.split()[1][:-1]) / 100 - share) < 0.006
    assert "blocks of 8 x 16" in ax.get_title()


def test_blocks_of_a_long_row_and_of_lengths_that_do_not_divide():
    assert image(viz.plot_blocks(Causal(), 2**17, block_q=1024, block_k=1024)).shape == (128, 128)
    ax = viz.plot_blocks(Causal(), 100, 90, block_q=32, block_k=64)
    assert image(ax).shape == (4, 2) and ax.get_xlim() == (0, 90) and ax.get_ylim() == (100, 0)


def test_heads():
    mask = MaskFn(by_head)
    ax = viz.plot_heads(mask, 64, heads=3, block_q=8, block_k=8)
    full, partial, skipped = ([bar.get_width() for bar in bars] for bars in ax.containers)
    np.testing.assert_allclose(np.add(np.add(full, partial), skipped), 100)
    for head in range(3):
        one = viz.plot_blocks(mask, 64, block_q=8, block_k=8, heads=3, head=head)
        assert skipped[head] == pytest.approx(100 * np.mean(image(one) == 0))
    assert skipped[0] > skipped[1] > skipped[2] > 0
    assert "%" in ax.get_xlabel() and ax.get_ylabel() == "head"


def test_weights():
    query, key_, value = jax.random.normal(jax.random.key(0), (3, 2, 6, 2, 4))
    out = attention(
        query, key_, value, Dense(AttentionMetadata()), mask=Causal(), return_weights=True
    )
    ax = viz.plot_weights(out, batch=1, head=1, key_labels=list("attend"))
    np.testing.assert_array_equal(image(ax), out.attention_weights[1, 1])
    assert [label.get_text() for label in ax.get_xticklabels()] == list("attend")
    bar = ax.images[0].colorbar
    assert bar.ax.get_ylabel() == "attention weight" and bar.vmin == 0
    same = viz.plot_weights(out.attention_weights[1].astype(jnp.bfloat16), head=1)
    np.testing.assert_allclose(image(same), image(ax), rtol=2**-8)


def bars(ax):
    """The bars that compute, and those that wait, `[hops, devices]` each."""
    waits, works = ax.containers[::2], ax.containers[1::2]
    return [np.array([[b.get_width() for b in c] for c in kind]) for kind in (works, waits)]


@pytest.mark.parametrize(
    "layout, mask", [(Contiguous(), SlidingWindow(100, 0) & Causal()), (Zigzag(), None)]
)
def test_ring(layout, mask):
    plan = ring_plan(1024, 8, layout=layout, mask=mask)
    ax = viz.plot_ring(plan)
    works, waits = bars(ax)
    np.testing.assert_allclose(works, plan.flops)
    np.testing.assert_allclose(waits, np.max(plan.flops, 1, keepdims=True) - plan.flops)
    assert ax.get_ylabel() == "device" and type(layout).__name__ in ax.get_title()
    for shift, hop in zip(plan.shifts, ax.containers[1::2]):
        starts = {bar.get_x() for bar in hop}
        assert len(starts) == 1  # in lock step
        numbers = [
            a.get_text()
            for a in ax.texts
            if a.xy[0] in [b.get_x() + b.get_width() / 2 for b in hop]
        ]
        shown = [
            (i - shift) % 8
            for i, b in enumerate(hop)
            if b.get_width() > 0.02 * np.sum(np.max(plan.flops, 1))
        ]
        assert numbers == [str(i) for i in shown]


def test_a_zigzag_ring_is_done_earlier():
    _, (first, second) = plt.subplots(2, 1, sharex=True)
    for layout, ax in ((Contiguous(), first), (Zigzag(), second)):
        viz.plot_ring(ring_plan(4096, 8, layout=layout, mask=Causal()), ax=ax)
    ends = [
        max(b.get_x() + b.get_width() for c in ax.containers for b in c) for ax in (first, second)
    ]
    assert ends[0] > 1.8 * ends[1] and first.get_xlim()[1] >= ends[0]
    assert bars(second)[1].sum() < 0.01 * bars(first)[1].sum()


def test_draws_where_it_is_told():
    figure, axes = plt.subplots(2, 4)
    weights = np.full((1, 2, 2), 0.5)
    calls = [
        lambda ax: viz.plot_mask(Causal(), 4, ax=ax),
        lambda ax: viz.plot_blocks(Causal(), 256, ax=ax),
        lambda ax: viz.plot_heads(Causal(), 256, heads=2, ax=ax),
        lambda ax: viz.plot_weights(weights, ax=ax),
        lambda ax: viz.plot_ring(ring_plan(64, 2), ax=ax),
    ]
    for call, ax in zip(calls, axes.flat):
        assert call(ax) is ax
    assert plt.get_fignums() == [figure.number]


def traced(plot):
    jax.jit(lambda ids: plot(Segments(ids), 256) and ids)(jnp.zeros(256, jnp.int32))


WRONG = {
    "There is no mask": lambda: viz.plot_mask(None, 4),
    "plot_blocks": lambda: viz.plot_mask(Causal(), 2**13),
    "1 to .* pairs, not 0 x 4": lambda: viz.plot_mask(Causal(), 0, 4),
    "head=2 is outside of the mask's axes, which have 2": lambda: viz.plot_blocks(
        Causal(), 256, heads=2, head=2
    ),
    "batch=-1": lambda: viz.plot_mask(Causal(), 4, batch=-1),
    "outside of jax.jit": lambda: traced(viz.plot_blocks),
    "draw it outside of jax.jit": lambda: traced(viz.plot_mask),
    "return_weights=True": lambda: viz.plot_weights(AttentionOutput()),
    r"\[\*b, heads, t, s\], got \[2, 2\]": lambda: viz.plot_weights(np.ones((2, 2))),
    "2 query_labels for 3": lambda: viz.plot_weights(np.ones((1, 3, 3)), query_labels="ab"),
    "heads must be at least 1, got 0": lambda: viz.plot_heads("causal", 4, heads=0),
    "batch_shape must be at least 1, got 0": lambda: viz.plot_heads(
        "causal", 4, heads=2, batch_shape=(0,)
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_errors(message):
    with pytest.raises(ValueError, match=message):
        WRONG[message]()


def python(program, **env):
    env = {**os.environ, "PYTHONPATH": str(Path(eqattn.__file__).parents[1]), **env}
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "MPLBACKEND"):
        env.pop(name, None)
    return subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)


def test_needs_no_display_and_saves(tmp_path):
    program = (
        "import sys, eqattn\n"
        "from eqattn import viz\n"
        "figure = viz.plot_mask(eqattn.Causal(), 16, block_q=4, block_k=4).figure\n"
        f"figure.savefig({str(tmp_path / 'mask.png')!r}), figure.savefig({str(tmp_path / 'mask.svg')!r})"
    )
    done = python(program)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mask.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (tmp_path / "mask.svg").read_text()


def test_a_strategy_without_weights_is_refused():
    x = jnp.ones((4, 1, 8))
    out = attention(x, x, x, Blockwise(AttentionMetadata()))
    with pytest.raises(ValueError, match="return_weights"):
        viz.plot_weights(out)


LONG = (
    Causal()
    & (SlidingWindow(1023, 0, sinks=64) | ~MaskFn(lambda b, h, q, k: k % 2 == 0))
    & KeyPadding(60)
)


SHORT = Causal() & SlidingWindow(23, 0, sinks=4)
SIZES = [(9, 5), (10, 4), (6, 6), (9, 9), (14, 5), None]


@pytest.mark.parametrize("mask, size", [(SHORT, None), (LONG, (6, 6))], ids=["short", "long"])
def test_no_title_is_cut(mask, size):
    """Neither by the border of the figure nor by the next axes, at any size."""
    for draw in (viz.plot_mask, viz.plot_blocks):
        if size is None:
            axes = [draw(mask, 64)]
        else:
            _, axes = plt.subplots(1, 2, figsize=size, layout="constrained")
            for ax in axes:
                draw(mask, 64, ax=ax, block_q=8, block_k=8)
        figure = axes[0].figure
        figure.canvas.draw()
        boxes = [ax.title.get_window_extent() for ax in axes]
        inside = figure.bbox
        for box, ax in zip(boxes, axes):
            assert inside.x0 <= box.x0 and box.x1 <= inside.x1 and box.y1 <= inside.y1
            assert ax.get_legend().get_window_extent().y0 >= inside.y0
        assert not any(a.overlaps(b) for a, b in zip(boxes, boxes[1:]))
        plt.close(figure)


def test_labels_are_drawn_as_written():
    ax = viz.plot_weights(np.full((1, 2, 2), 0.5), query_labels=["$$", "$x_1$"])
    ax.figure.canvas.draw()
    assert [x.get_text() for x in ax.get_yticklabels()] == ["$$", "$x_1$"]
    assert not any(x.get_parse_math() for x in ax.get_yticklabels())


def test_errors_open_no_figure():
    weights = np.ones((1, 2, 3))
    for call in (
        lambda: viz.plot_weights(weights, query_labels=["a"]),
        lambda: viz.plot_weights(np.zeros((1, 0, 3))),
        lambda: viz.plot_mask(Causal(), 4, block_q=0),
        lambda: viz.plot_mask(Causal(), 4, block_q=-1),
        lambda: viz.plot_blocks(Causal(), 3, 0),
        lambda: viz.plot_heads(Causal(), 0, heads=2),
    ):
        with pytest.raises(ValueError):
            call()
    assert not plt.get_fignums()


def test_heads_are_classed_once(monkeypatch):
    calls, given = [], viz._masks.block_table
    monkeypatch.setattr(
        viz._masks, "block_table", lambda *a, **k: calls.append(a) or given(*a, **k)
    )
    viz.plot_heads(MaskFn(by_head), 64, heads=3, block_q=8, block_k=8, batch_shape=(2,))
    assert len(calls) == 1
