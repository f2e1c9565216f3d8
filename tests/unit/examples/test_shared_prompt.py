"""The example: samples share the pages of their prompt, and their logits are those of whole texts."""

import shared_prompt
from _programs import refuses


def test_samples_share_their_prompt(capsys):
    found = shared_prompt.main(["--prompt", "x" * 36, "--samples", "3", "--new", "3"])
    # Of 3 pages each, the first two are shared. The last, in part of the prompt, is not.
    assert (found.pages, found.apart) == (2 + 3, 9)
    assert found.error < 1e-5 and len(set(found.texts)) == 3
    assert "pages in use: 5, without sharing 9" in capsys.readouterr().out


def test_numbers_that_make_no_sense(capsys):
    refuses(shared_prompt.main, ["--samples", "0"], "--samples and --new are at least 1", capsys)
    refuses(shared_prompt.main, ["--prompt", ""], "--prompt needs a byte", capsys)
