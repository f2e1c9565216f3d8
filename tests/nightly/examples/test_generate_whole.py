"""`examples/generate.py`: cached text is that of full recomputation, whatever shares the batch."""

import pathlib

import _text
import cache_figures
import generate
import language_model as lm
import pytest
from test_generate import as_users_run_it  # noqa: F401


PROMPTS = ["import ", "def main(self, text, and more than one piece of a prompt):", "x", "class "]


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


def test_as_full_recomputation(folder, capsys):
    status, out = serve(folder, capsys, "--check")
    assert status == 0 and "as full recomputation" in out
    assert all(f"\n{prompt}" in out for prompt in PROMPTS)


def test_a_draft_changes_the_number_of_steps_only(folder, capsys):
    _, alone = serve(folder, capsys, "--temperature", "0")
    status, out = serve(folder, capsys, "--check", "--draft", str(folder / "draft"), "--ahead", "3")
    assert status == 0 and "as full recomputation" in out
    texts = lambda out: sorted(out.split("bytes in")[0].split("--- "))
    assert texts(alone)[:-1] == texts(out)[:-1]
    steps = [int(o.split("bytes in ")[1].split()[0]) for o in (alone, out)]
    assert steps[1] < steps[0]


def test_eight_bits_and_a_cache_on_the_language_model(tmp_path):
    """On text that was held out, with a model trained on the rest, and after 2,048 bytes."""
    lm.main(["--quick", "--steps", "200", "--sample", "1", "--out", str(tmp_path)])
    model, config = generate.fetch(tmp_path, [])
    held_out = _text.split(_text.read_documents(None))[1]
    found = cache_figures.quality(model, config, held_out)
    assert 0 < found.error < 0.01
    assert abs(found.int8 - found.bfloat16) < 0.01 and found.bfloat16 < 4
    assert cache_figures.speed(lm.Config().complete(), 2048).ratio > 20
