"""The pages are read by people: short whole sentences, and code that fits its column."""

import re
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "pages").glob("*.md"))]
WORDS, COLUMNS = 25, 88


def sentences(text: str) -> list[str]:
    """Of prose: without code, formulas, tables, headings, pictures and directives."""
    text = re.sub(r"^```.*?^```$|^\$\$.*?^\$\$|<!--.*?-->", "\n", text, flags=re.DOTALL | re.M)
    text = re.sub(r"^(#|\||:::|!\[|--8<--|    ).*$", "\n", text, flags=re.M)
    parts = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text)
    found = []
    for part in parts:
        part = re.sub(r"\[([^]]*)\](?:\([^)]*\)|\[[^]]*\])", r"\1", " ".join(part.split()))
        found += re.split(
            r"(?<=[.:;!?]) (?=[A-Z`*\"(])|(?<=;) ", re.sub(r"^(?:[-*]|\d+\.) ", "", part)
        )
    return [x for x in found if x.strip()]


def words(sentence: str) -> int:
    """Code and formulas count as one word."""
    sentence = re.sub(r"`[^`]*`|\$[^$]*\$", "x", sentence)
    return len(re.findall(r"[^\s\W]+(?:['’.-]\w+)*", sentence))


def long_sentences(path: Path) -> list[str]:
    return [x for x in sentences(path.read_text()) if words(x) > WORDS]


def code(text: str) -> list[str]:
    found = re.findall(r"^```(?:python|py|bash)\n(.*?)^```$", text, re.DOTALL | re.M)
    return [line for block in found for line in block.splitlines()]


def fragments(path: Path) -> list[str]:
    """Sentences without a verb. Items of lists and cells of tables may be names of things."""
    text = re.sub(r"^\s*(?:[-*]|\d+\.) .*(?:\n {2,}.*)*$", "", path.read_text(), flags=re.M)
    whole = [x for x in sentences(text) if re.fullmatch(r"[A-Z][^()]*\.", x) and words(x) > 3]
    return [x for x in whole if not VERB.search(re.sub(r"`[^`]*`", "x", x))]


# A plural noun passes for a verb, so some fragments are not found. What is found has no verb, or one
# that is to be added here.
VERB = re.compile(
    r"\b(?:is|are|was|were|be|has|have|had|do|does|did|can|may|must|will|would|need|let|see|use|call"
    r"|pass|give|take|make|say|write|read|run|put|add|come|go|get|know|show|keep|set|turn|change|took|ask|wrote|match|raise|compile|wait"
    r"|\w{2,}(?:s|ed|en))\b",
    re.IGNORECASE,
)


def test_sentences_are_told_apart():
    text = "# One\n\nIt is `a. b` so. See [more](x.md): that is\nall; or not.\n\n- First\n- Second one\n"
    assert sentences(text) == [
        "It is `a. b` so.", "See more: that is all;", "or not.", "First", "Second one"
    ]  # fmt: skip
    assert words("A `long piece of code` counts, $as + one$ too.") == 5
    assert VERB.search("This has one.") and not VERB.search("Nothing of the kind here.")
    assert code("```bash\nls\n```\n```text\nlong\n```\n") == ["ls"]


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_sentences_are_short(path):
    assert long_sentences(path) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_sentences_have_verbs(path):
    assert fragments(path) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_code_fits(path):
    assert [x for x in code(path.read_text()) if len(x) > COLUMNS] == []
