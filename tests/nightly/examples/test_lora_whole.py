"""Adapters learn, and go on where they were."""

import re
import shutil

import jax
import pytest
from _programs import refuses


pytest.importorskip("tokenizers", reason="tokenizers is not installed: it is in the tests extra")

import lora as example  # noqa: E402
import tokenizers  # noqa: E402
from test_lora import REFERENCES  # noqa: E402


def test_a_run_learns_and_goes_on(tmp_path, capsys):
    folder, text = tmp_path / "model", tmp_path / "text"
    folder.mkdir()
    text.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(REFERENCES / "llama" / name, folder)
    letters = {x: i for i, x in enumerate("?abcdefghijklmnopqrstuvwxyz .,!-")}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    for i in range(40):
        (text / f"{i}.txt").write_text(f"{chr(97 + i % 26)} the cat sat on the mat. " * (1 + i % 3))

    def run(out, steps, *more):
        arguments = [folder, "--text", text, "--out", tmp_path / out, "--steps", steps]
        arguments += ["--row", 48, "--batch", 2, "--lr", 0.02, "--seed", 3]
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # for optax
            assert example.main([*map(str, arguments), *more]) == 0
        printed = capsys.readouterr().out
        found = re.search(r"held-out loss (\S+) before, (\S+) after", printed)
        return printed, [float(x) for x in found.groups()]

    _, (before, after) = run("whole", 40)
    assert after < before - 0.5
    run("parts", 20)
    printed, losses = run("parts", 40, "--prompt", "the cat")
    written = re.search(r"^t h e   c a t (.*)$", printed, re.MULTILINE)
    assert written and len(written[1]) == 2 * 40 - 1  # the tokenizer puts blanks between letters
    assert "after step 20" in printed and losses == [before, after]
    assert (tmp_path / "parts" / "loss.png").stat().st_size > 5000
    arguments = [folder, "--text", text, "--out", tmp_path / "parts", "--rank", 4, "--row", 48]
    refuses(example.main, [str(x) for x in arguments], "is of another run: {'rank': (8, 4)", capsys)
    refuses(
        example.main, [str(REFERENCES / "llama"), "--text", str(text)], "tokenizer.json", capsys
    )
