"""The example finds what is meant with published weights."""

import re

import pytest


pytest.importorskip("tokenizers", reason="tokenizers is not installed: it is in the tests extra")

import sentence_embeddings as example  # noqa: E402
from test_sentence_embeddings import published  # noqa: E402


@published
def test_published_weights_find_what_is_meant(capsys):
    assert example.main(["--check"]) == 0
    out = capsys.readouterr().out
    best = dict(re.findall(r"^(\S.*)\n +\d\.\d\d  (.*)$", out, re.MULTILINE))
    expected = ["Bees", "The central bank", "The tenant", "Our kitten", "The striker", "Back up"]
    for query, start in zip(example.QUERIES, expected, strict=True):
        assert best[query].startswith(start)
