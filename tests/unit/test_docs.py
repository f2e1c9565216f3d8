"""The documentation is true: Python blocks run and print what is shown, links lead somewhere."""

import inspect
import io
import re
import tomllib

import jax
import jax.export
import pytest
from _pages import blocks, PAGES, ROOT
from matplotlib import pyplot as plt

import eqattn.cache
import eqattn.stats
import eqattn.viz
from eqattn import AttentionRegistry


_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")


@pytest.fixture
def quick_compilation():
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


# With libtpu but without a TPU, the profiler ends the whole process: tests/nightly/test_profiling_page.py.
ALONE = {"profiling"}
RUN = [p for p in PAGES if list(blocks(p)) and p.stem not in ALONE]


# The pages that show whole models take long to compile: tests/nightly/test_docs_whole.py.
MODELS = {"cookbook", "layers", "recipes"}


@pytest.mark.parametrize("path", [p for p in RUN if p.stem not in MODELS], ids=lambda p: p.stem)
@pytest.mark.usefixtures("quick_compilation")
def test_blocks_run(path, monkeypatch, capsys, request):
    if "symbolic_shape" in path.read_text():  # such a size is no `int`, which annotations name
        request.getfixturevalue("unchecked")
    monkeypatch.setattr(AttentionRegistry, "_registry", dict(AttentionRegistry._registry))
    monkeypatch.chdir(ROOT)
    namespace = {"__name__": path.stem}
    for line, source, shown, picture in blocks(path):
        # Blank lines in front make the line numbers of an error those of the page.
        exec(compile("\n" * line + source, path, "exec"), namespace)
        printed = capsys.readouterr().out
        if shown is not None:
            assert printed == shown
        if picture is not None:  # the site shows the last figure that the block has drawn
            drawn = io.BytesIO()
            plt.gcf().savefig(drawn, format="svg")
            plt.close("all")
            assert drawn.tell() > 10_000


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_links_lead_somewhere(path):
    drawn = {picture for page in PAGES for *_, picture in blocks(page)}
    links = {link for link in _LINK.findall(path.read_text()) if "://" not in link} - drawn
    missing = [link for link in links if not (path.parent / link).exists()]
    assert not missing


def test_links_lead_to_headings():
    """Those of docstrings too, which the page of the API shows."""
    pages = ROOT / "docs/pages"
    texts = {path: _no_code(path.read_text()) for path in pages.glob("*.md")}
    sources = (ROOT / "eqattn").glob("**/*.py")
    given = [*texts.items(), *((pages / "api.md", path.read_text()) for path in sources)]
    links = {
        ((path.parent / page).resolve() if page else path, anchor)
        for path, text in given
        for page, anchor in re.findall(r"\]\(((?:[\w/.-]+\.md)?)#([\w.-]+)\)", text)
    }
    assert len(links) > 50
    assert not {
        (path.name, anchor)
        for path, anchor in links
        if anchor not in {_anchor(x) for x in re.findall(r"(?m)^#+ (.*)$", texts[path])}
        and f"\n::: {anchor}\n" not in texts[path]
    }


def _no_code(text):
    return re.sub(r"(?ms)^```.*?^```$", "", text)


def _anchor(heading):
    words = re.sub(r"[^\w\s-]", "", re.sub(r"\]\([^)]*\)", "", heading)).strip().lower()
    return re.sub(r"[-\s]+", "-", words)


def test_every_example_is_listed():
    programs = {f"examples/{p.name}" for p in (ROOT / "examples").glob("[!_]*.py")}
    for page in (ROOT / "README.md", ROOT / "docs/pages/index.md"):
        listed = set(re.findall(r"^\| `(examples/\w+\.py)` \|", page.read_text(), re.MULTILINE))
        assert listed == programs


def test_every_public_name_is_in_the_reference():
    text = (ROOT / "docs/pages/api.md").read_text()
    documented = set(re.findall(r"^::: eqattn\.([\w.]+)$", text, re.MULTILINE))
    public = set()
    modules = {"": eqattn, "masks.": eqattn.masks, "scores.": eqattn.scores}
    modules |= {"cache.": eqattn.cache, "viz.": eqattn.viz, "stats.": eqattn.stats}
    modules |= {"compat.": eqattn.compat, "strategies.": eqattn.strategies}
    for prefix, module in modules.items():
        names = [n for n in dir(module) if not n.startswith("_")]  # also what is imported when used
        values = {n: getattr(module, n) for n in names}
        public |= {prefix + n for n, x in values.items() if not inspect.ismodule(x)}
    seen = {id(_resolve(name)) for name in documented}
    assert not [name for name in sorted(public) if id(_resolve(name)) not in seen]
    assert documented <= public
    first = text[: text.index("\n## Names of other libraries\n")]
    assert "eqattn.compat" not in first and text.count("::: eqattn.compat.") == 16


def _resolve(name):
    value = eqattn
    for part in name.split("."):
        value = getattr(value, part)
    return value


def test_changelog_and_citation_are_of_this_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert eqattn.__version__ == project["version"]
    changes = (ROOT / "docs/pages/changelog.md").read_text()
    versions = re.findall(r"^## (\S+)", changes, re.MULTILINE)
    assert versions[0] == project["version"] and len(set(versions)) == len(versions)
    lines = (ROOT / "docs/CITATION.cff").read_text().splitlines()
    citation = dict(line.split(": ", 1) for line in lines if ": " in line and line[0] != " ")
    assert citation["version"] == project["version"] and citation["license"] == project["license"]
    assert citation["cff-version"] == "1.2.0"
