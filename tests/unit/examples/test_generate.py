"""`examples/generate.py`: cached text is that of full recomputation, whatever shares the batch."""

import pathlib

import _text
import cache_figures
import generate
import jax
import language_model as lm
import numpy as np
import pytest
from _programs import refuses


PROMPTS = ["import ", "def main(self, text, and more than one piece of a prompt):", "x", "class "]


@pytest.fixture(scope="module", autouse=True)
def as_users_run_it():
    """Optax does not keep to the strict rules of this suite."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a small model, and of a smaller one that guesses for it."""
    root = tmp_path_factory.mktemp("models")
    text = root / "text.py"
    text.write_text(pathlib.Path(lm.__file__).read_text() * 2)
    small = ["--quick", "--steps", "30", "--context", "32", "--sample", "1", "--text", str(text)]
    lm.main(["--out", str(root / "model"), *small])
    lm.main(["--out", str(root / "draft"), *small, "--layers", "1", "--width", "32"])
    return root


def serve(folder, capsys, *more):
    options = ["--model", str(folder / "model"), "--length", "24", "--rows", "2", "--prompt"]
    status = generate.main([*options, *PROMPTS, *more])
    return status, capsys.readouterr().out


@pytest.mark.slow
def test_as_full_recomputation(folder, capsys):
    status, out = serve(folder, capsys, "--check")
    assert status == 0 and "as full recomputation" in out
    assert all(f"\n{prompt}" in out for prompt in PROMPTS)


@pytest.mark.slow
def test_a_draft_changes_the_number_of_steps_only(folder, capsys):
    _, alone = serve(folder, capsys, "--temperature", "0")
    status, out = serve(folder, capsys, "--check", "--draft", str(folder / "draft"), "--ahead", "3")
    assert status == 0 and "as full recomputation" in out
    texts = lambda out: sorted(out.split("bytes in")[0].split("--- "))
    assert texts(alone)[:-1] == texts(out)[:-1]
    steps = [int(o.split("bytes in ")[1].split()[0]) for o in (alone, out)]
    assert steps[1] < steps[0]


def test_samples_are_among_the_likeliest():
    logits = jax.numpy.log(jax.numpy.arange(1.0, 257.0))
    keys = jax.random.split(jax.random.key(0), 300)

    def drawn(**options):
        choice = generate.Choice(temperature=1.0, **options)
        return set(np.asarray(jax.vmap(lambda key: choice(logits, key))(keys)).tolist())

    assert drawn(top_k=3) == {253, 254, 255}
    assert drawn(top_p=0.01) == {254, 255}  # 255 alone has a probability of 0.0078
    assert len(drawn()) > 100
    assert int(generate.Choice()(logits, keys[0])) == 255


@pytest.mark.slow
def test_eight_bits_and_a_cache_on_the_language_model(tmp_path):
    """On text that was held out, with a model trained on the rest, and after 2,048 bytes."""
    lm.main(["--quick", "--steps", "200", "--sample", "1", "--out", str(tmp_path)])
    model, config = generate.fetch(tmp_path, [])
    held_out = _text.split(_text.read_documents(None))[1]
    found = cache_figures.quality(model, config, held_out)
    assert 0 < found.error < 0.01
    assert abs(found.int8 - found.bfloat16) < 0.01 and found.bfloat16 < 4
    assert cache_figures.speed(lm.Config().complete(), 2048).ratio > 20


@pytest.mark.parametrize(
    "words, message",
    [
        ("--rows 0", "--rows must be at least 1"),
        ("--check --temperature 1", "need --temperature 0"),
        ("--top-p 0", "--top-p"),
    ],
)
def test_bad_arguments(words, message, capsys):
    refuses(generate.main, words.split(), message, capsys)


def test_the_model_is_the_one_that_was_trained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert generate.trained() == pathlib.Path("runs/generate")
    (tmp_path / "runs" / "language_model").mkdir(parents=True)
    (tmp_path / "runs" / "language_model" / "checkpoint.eqx").touch()
    assert generate.trained() == pathlib.Path("runs/language_model")
