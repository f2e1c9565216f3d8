"""Prose is read by people: short whole sentences, and code that fits its column.

Pages have sentences with a verb and at most 25 words. So have docstrings, the strings under
constants, and comments on lines of their own. Only an opening of these may be a noun phrase, which
names what it stands at: the first sentence of the text, of an argument, or after **Returns:** and
the like. A public function always says what it does, with a verb.
"""

import ast
import inspect
import itertools
import re
import tokenize
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
got held kept met passed raised ran said saw took went wrote measured
"""
VERBS = """
accept accumulate add allow answer appear append apply arrive ask assert assume attend avoid balance
become begin belong bring broadcast build call cancel change choose combine come compare compile
compute contain continue convert decide define depend differ divide draw drop emulate equal evaluate exist
expect explain fail fall fill find fit flow follow forget gain gather generate get give go grow halve happen hide
hold ignore import include insist install interpret join judge keep know lack lead learn leave
let lie load look lose make match mean measure merge multiply need omit open pack pass permute
prefer print produce promise prove put quantize raise reach read receive recognise refuse reject remain
remove repeat replace report require resolve restore return reveal rotate run save say see
select send serve set show sort spill split stand stay stop store stream subclass support take
tell train translate transpose travel treat try turn understand undo unpack use vary visit wait want
weigh widen win work wrap write
"""
NOUNS_TOO = """
bias bound carry copy cost count end exchange fold form group hash list map mask move name narrow pair place
point query rank record round sample scale shard share slice spread start state step sum test time
trace transform
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
    return [f"{x} ({odd})" for x in sentences(path.read_text()) for odd in oddities(x)]


def oddities(sentence: str) -> list[str]:
    plain = re.sub(r"`[^`]*`|\$[^$]*\$", "x", sentence)
    odd = [f"{old}: {new}" for old, new in ODD.items() if re.search(rf"\b(?:{old})\b", plain)]
    odd += ["of ... of ... of"] * bool(CHAIN.search(plain))
    return odd + ["what do the words point to?"] * (len(POINTERS.findall(plain)) > POINTS)


# The code, by the rule at the top.
MODULES = sorted((ROOT / "eqattn").rglob("*.py"))
PUBLIC = [ROOT / "eqattn" / f"{room}/__init__.py" for room in
    (".", "cache", "compat", "masks", "nn", "scores", "stats", "strategies", "viz")]  # fmt: skip
# With these, a phrase does not name a thing.
NO_NAME = re.compile(
    r"(?:And|As|At|Between|But|By|Else|For|From|If|In|Like|Next|None|On|Or|Otherwise|So|Such|That"
    r"|Them|Then|Those|To|Under|Until|When|Where|While|With|Without|\d+ if)\b"
)
OF = re.compile("of ", re.I)
# Between two sentences, not in code.
END = re.compile(r"(?<=[.!?]) (?=[A-Z`*\"(])(?=(?:[^`]*`[^`]*`)*[^`]*$)")


def exported() -> set[str]:
    """The names that the rooms for users import into their `__init__`."""
    nodes = [x for path in PUBLIC for x in ast.walk(ast.parse(path.read_text()))]
    names = [a.asname or a.name for x in nodes if isinstance(x, ast.ImportFrom) for a in x.names]
    return {x for x in names if not x.startswith("_")}


def docstrings(path: Path, called: set[str]):
    """The name of each definition or constant, its docstring, and whether users call it."""

    def visit(node, name: str, public: bool):
        for before, child in itertools.pairwise([None, *ast.iter_child_nodes(node)]):
            text = getattr(child.value, "value", None) if isinstance(child, ast.Expr) else None
            if isinstance(before, ast.Assign | ast.AnnAssign) and isinstance(text, str):
                target = before.targets[0] if isinstance(before, ast.Assign) else before.target
                yield f"{name}{ast.unparse(target)}", text, False
            if not isinstance(child, ast.ClassDef | ast.FunctionDef):
                yield from visit(child, name, public)
                continue
            is_public = not child.name.startswith("_") and (public or child.name in called)
            is_value = any("property" in ast.unparse(x) for x in child.decorator_list)
            is_called = is_public and isinstance(child, ast.FunctionDef) and not is_value
            yield f"{name}{child.name}", ast.get_docstring(child), is_called
            inner = is_public and isinstance(child, ast.ClassDef)
            yield from visit(child, f"{name}{child.name}.", inner)

    tree = ast.parse(path.read_text())
    yield path.stem, ast.get_docstring(tree), False
    yield from visit(tree, "", False)


def docstring_parts(doc: str) -> list[str]:
    """Its paragraphs and items, in one line each: without code, formulas, tables and citations."""
    doc = inspect.cleandoc(doc)
    doc = re.sub(r"^```.*?^```$|^\$\$.*?^\$\$", "", doc, flags=re.DOTALL | re.M)
    doc = re.sub(r"^\?\?\? .*\n(?:\n| {4}.*\n?)*", "\n", doc, flags=re.M)
    doc = re.sub(r"^\|.*$", "\n", doc, flags=re.M)
    parts = [re.split(r"\n(?=(?:[-*]|\d+\.) )", x) for x in re.split(r"\n(?: *\n)+", doc)]
    plain = [" ".join(x.split()) for part in parts for x in part if not x.startswith("    ")]
    return [re.sub(r"\[([^]]*)\](?:\([^)]*\)|\[[^]]*\])", r"\1", x) for x in plain]


def docstring_sentences(doc: str) -> list[tuple[str, str]]:
    """Each sentence, and what it opens: "docstring", "argument", "marker", or "" if nothing."""
    found, opens = [], "docstring"
    for part in docstring_parts(doc):
        head = re.match(r"(?:[-*]|\d+\.) (?:`[^`]*`(?:,| and)? ?)*(?::|\b) *", part)
        opens = "argument" if head else opens
        for piece in re.split(r"(\*\*\w+:\*\*)", part[head.end() if head else 0 :]):
            if re.fullmatch(r"\*\*\w+:\*\*", piece):
                opens = "marker"
            elif piece.strip():
                whole = re.split(END, piece.strip())
                found += [(opens, whole[0]), *(("", x) for x in whole[1:])]
                opens = ""
    return found


def unreadable(doc: str, called: bool = False) -> list[str]:
    """The sentences of a docstring that break the rule at the top of this file."""
    found = []
    for opens, sentence in docstring_sentences(doc):
        ends = re.match(r"[A-Z`].*[.:?!]$", sentence) or opens in ("docstring", "argument")
        may_name = opens and not (called and opens == "docstring")
        if not has_verb(sentence) and ends and (not may_name or NO_NAME.match(sentence)):
            found.append(f"{sentence} (no verb)")
        found += [f"{sentence} (of what?)"] * bool(opens and OF.match(sentence))
        found += [f"{x} ({words(x)} words)" for x in sentences(sentence) if words(x) > WORDS]
        found += [f"{sentence} ({x})" for x in oddities(sentence)]
    return found


def comments(path: Path) -> list[str]:
    """Those on lines of their own, as Markdown; what is indented in them is code or a formula."""
    found, before, column = [], 0, -1
    with path.open("rb") as file:
        tokens = [x for x in tokenize.tokenize(file.readline) if x.type == tokenize.COMMENT]
    for token in tokens:
        (line, start), text = token.start, re.sub("^# ?", "", token.string)
        if token.line.lstrip().startswith("#") and not re.match("(pyright|fmt|ruff): ", text):
            goes_on = line == before + 1 and start == column
            found[-1:] = [f"{found[-1]}\n{text}"] if goes_on else [*found[-1:], text]
            before, column = line, start
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


@pytest.mark.parametrize(
    "text",
    [
        "Attention over some of the keys.",
        "Whether probabilities are multiplied by dropout weights.",
        "`cap * tanh(logit / cap)`, as in Gemma 2.",
        "The rows.\n\n**Arguments:**\n\n- `a`, `b`: two sizes. They are ints.\n- `c`: another,\n"
        "    on a second line.\n\n**Returns:** the logsumexp, `[b, h]`.\n\n    code: no. verb here.\n",
    ],
)
def test_docstrings_that_can_be_read(text):
    assert unreadable(text) == []


@pytest.mark.parametrize(
    "text, reason",
    [
        ("By dropout.", "no verb"),
        ("Of a block.", "of what?"),
        ("The rows. And the keys.", "no verb"),
        ("The rows.\n\n**Arguments:**\n\n- `a`: the size. A static int.", "no verb"),
        ("The rows.\n\n**Arguments:**\n\n- `a`: of a block.", "of what?"),
        ("The rows.\n\n**Returns:** the rows. None otherwise.", "no verb"),
        ("The rows of blocks of keys of heads.", "of ... of ... of"),
        (f"It has {'so many ' * 12}words.", "27 words"),
    ],
)
def test_docstrings_that_cannot(text, reason):
    (found,) = unreadable(text)
    assert found.endswith(f"({reason})")


def test_public_functions_say_what_they_do():
    assert unreadable("The rows of a block.", called=True)
    assert not unreadable("Returns the rows of a block.", called=True)


def test_where_docstrings_and_comments_are(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        '"""Top."""\nN = 1\n"""Bound."""\n\n\nclass A:\n    """Class."""\n\n    def f(self):\n'
        '        """Method."""\n        # One,\n        # and\n        #     x = y\n        return 1  # in line\n'
        '\n    @property\n    def g(self):\n        """Value."""\n'
    )
    found = [("module", "Top.", False), ("N", "Bound.", False), ("A", "Class.", False)]
    found += [("A.f", "Method.", True), ("A.g", "Value.", False)]
    assert list(docstrings(path, {"A"})) == found
    assert comments(path) == ["One,\nand\n    x = y"]
    assert {"attention", "Carry", "KVCache"} <= exported()


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


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_docstrings_are_whole_sentences(path):
    called = exported()
    found = [(name, unreadable(doc, said)) for name, doc, said in docstrings(path, called) if doc]
    assert [x for x in found if x[1]] == []


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_comments_are_whole_sentences(path):
    found = [x for text in comments(path) for x in unreadable(text)]
    assert found == []
