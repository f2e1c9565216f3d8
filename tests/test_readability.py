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
    whole = [x for x in sentences(text) if re.match(r"[A-Z`].*[.:;?!]$", x) and words(x) > 3]
    return [x for x in whole if not has_verb(x)]


def has_verb(sentence: str) -> bool:
    """Whether there is one outside of parentheses, in the present or with an auxiliary. Words that
    may be nouns too count only where an object follows: "the copies" have none, "it copies a" has.
    """
    plain = re.sub(r"\([^()]*\)?", "", re.sub(r"`[^`]*`|\$[^$]*\$", "x", sentence))
    return bool(VERB.search(plain))


def forms(verbs: str) -> str:
    """The verbs, and their third persons, as a pattern."""
    third = lambda verb: re.sub(
        r"([sxzo]|ch|sh)s$", r"\1es", re.sub(r"([^aeiou])ys$", r"\1ies", f"{verb}s")
    )
    return "|".join(x for verb in verbs.split() for x in (verb, third(verb)))


AUXILIARIES = """
is are was were be has have had do does did can may must will would should came compared gave
got held kept met passed raised ran said saw took wrote measured
"""
VERBS = """
accept accumulate add allow answer appear append apply arrive ask assert assume attend balance
become begin belong bring broadcast build call cancel change choose combine come compare compile
compute contain continue convert decide depend differ divide draw drop emulate exist expect
explain fail fall fill find fit flow follow forget gather generate get give go grow happen hide
hold ignore import include insist install interpret join judge keep know lack lead learn leave
let lie load look lose make match mean measure merge multiply need omit open pack pass permute
prefer print produce promise prove put quantize raise reach read receive refuse reject remain
remove repeat replace report require resolve restore return reveal rotate run save say see
select send serve set show sort spill split stand stay stop store stream subclass support take
tell train translate transpose travel treat try turn understand unpack use vary visit wait want
weigh widen work wrap write
"""
NOUNS_TOO = """
bias bound carry copy cost count end exchange form group hash map mask move name narrow pair place
point query rank record round sample scale shard share spread start state step sum test time
trace
"""
OBJECTS = """
a all an both by each every heads it its keys logits no nothing one other over pages rows such that
the their them these this those tiles tokens under what whole x
"""
either = lambda text: "|".join(text.split())
VERB = re.compile(
    rf"\b(?:{either(AUXILIARIES)}|{forms(VERBS)}"
    rf"|(?:{forms(NOUNS_TOO)})(?= (?:{either(OBJECTS)}|\d+)\b| [`*]))\b",
    re.I,
)


# Phrases of another century or of another language, and what to write.
ODD = {
    r"anew": "again",
    r"as ever": "as before",
    r"besides(?! the)": "also",
    r"but for": "except",
    r"for who|who asks": "for those who",
    r"in silence|without a word": "silently",
    r"nobody|no one": "say what is not done",
    r"of no matter": "does not matter",
    r"one of the other": "say which of which",
    r"So they do|So it (?:is|does) (?:for|in|with|without)": "say what it does",
    r"were (?:it|they|one) to": "if",
    r"would else|are else|is else": "otherwise",
}
CHAIN = re.compile(r"\bof\b(?:\W+\w+){1,3}?\W+of\b(?:\W+\w+){1,3}?\W+of\b")
POINTERS = re.compile(
    r"\b(?:those|these|its?|they|them|their|this|ones?|others?|both|which|what|that)\b", re.I
)
POINTS = 4


def unplain(path: Path) -> list[str]:
    """Sentences with an odd phrase, with "of" three times in a row, or with so many words which
    point elsewhere that a reader loses what they point to.
    """
    found = []
    for sentence in sentences(path.read_text()):
        plain = re.sub(r"`[^`]*`|\$[^$]*\$", "x", sentence)
        odd = [f"{old}: {new}" for old, new in ODD.items() if re.search(rf"\b(?:{old})\b", plain)]
        odd += ["of ... of ... of"] * bool(CHAIN.search(plain))
        odd += ["what do the words point to?"] * (len(POINTERS.findall(plain)) > POINTS)
        found += [f"{sentence} ({x})" for x in odd]
    return found


def test_sentences_are_told_apart():
    text = "# One\n\nIt is `a. b` so. See [more](x.md): that is\nall; or not.\n\n- First\n- Second one\n"
    assert sentences(text) == [
        "It is `a. b` so.", "See more: that is all;", "or not.", "First", "Second one"
    ]  # fmt: skip
    assert words("A `long piece of code` counts, $as + one$ too.") == 5
    assert code("```bash\nls\n```\n```text\nlong\n```\n") == ["ls"]


@pytest.mark.parametrize(
    "sentence",
    [
        "This has one.",
        "It copies a block.",
        "Blocks that a mask empties cost nothing.",
        "Name the axis.",
    ],
)
def test_sentences_that_have_a_verb(sentence):
    assert has_verb(sentence)


@pytest.mark.parametrize(
    "sentence",
    [
        "Nothing of the kind here.",
        "Attention of recent papers, made of masks, scores and Carries.",
        "One query and seven keys, in two parts.",
        "The rows and the copies of a block (which is large).",
    ],
)
def test_sentences_that_have_none(sentence):
    assert not has_verb(sentence)


def test_what_is_not_plain_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "All is plain here.\n\nIt differs in silence.\n\nThe ids of documents of rows of a batch are "
        "known.\n\nThose that it keeps are what they give to others.\n"
    )
    assert [x.split(" (")[-1] for x in unplain(page)] == [
        "in silence|without a word: silently)", "of ... of ... of)", "what do the words point to?)"
    ]  # fmt: skip


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_sentences_are_short(path):
    assert long_sentences(path) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_sentences_have_verbs(path):
    assert fragments(path) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_words_are_plain(path):
    assert unplain(path) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_code_fits(path):
    assert [x for x in code(path.read_text()) if len(x) > COLUMNS] == []
