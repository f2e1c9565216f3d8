"""Formulas become MathML, and code that draws its pictures, when the site is built: pages need no
script, and the repository holds no picture.
"""

import contextlib
import io
import os
import re
from html import unescape
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.structure.files import File


_FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<tex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL
)
_BLOCK = re.compile(
    r"^```python\n(?P<source>.*?)^```$(?:\n\n!\[[^]]*\]\((?P<name>\S+\.svg)\))?",
    re.MULTILINE | re.DOTALL,
)


def _mathml(match: re.Match) -> str:
    tag = match["tag"]
    display = "block" if tag == "div" else "inline"
    formula = convert(unescape(match["tex"]).strip(), display=display)
    return f'<{tag} class="formula">{formula}</{tag}>'


def on_page_content(html: str, **kwargs) -> str:
    del kwargs
    return _FORMULA.sub(_mathml, html)


def on_files(files, config):
    """Runs the pages that have pictures; each is the figure that the block before it has drawn."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("MPLBACKEND", "svg")
    from matplotlib import pyplot as plt

    with contextlib.chdir(Path(config.docs_dir).parents[1]):
        for page in sorted(Path(config.docs_dir).glob("*.md")):
            blocks, namespace = list(_BLOCK.finditer(page.read_text())), {}
            last = max((i for i, block in enumerate(blocks) if block["name"]), default=-1)
            for block in blocks[: last + 1]:
                exec(block["source"], namespace)
                if block["name"]:
                    picture = io.BytesIO()
                    plt.gcf().savefig(picture, format="svg")
                    file = File.generated(config, block["name"], content=picture.getvalue())
                    files.append(file)
    plt.close("all")
    return files
