"""`examples/generate.py`: cached text is that of full recomputation, whatever shares the batch."""

import pathlib

import generate
import jax
import numpy as np
import pytest
from _programs import refuses


@pytest.fixture(scope="module", autouse=True)
def as_users_run_it():
    """Optax does not keep to the strict rules of this suite."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


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
