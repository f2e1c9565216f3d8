"""Formulas become MathML, and the code in pictures.md its pictures, when the site is built: pages
need no script, and the repository holds no picture.
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
    return f"<{tag}>{convert(unescape(match['tex']).strip(), display=display)}</{tag}>"


def on_page_content(html: str, **kwargs) -> str:
    del kwargs
    return _FORMULA.sub(_mathml, html)


def on_files(files, config):
    """Runs the page's blocks; a picture is the figure that the block before it has drawn."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("MPLBACKEND", "svg")
    from matplotlib import pyplot as plt

    pages, namespace = Path(config.docs_dir), {}
    with contextlib.chdir(pages.parents[1]):
        for block in _BLOCK.finditer((pages / "pictures.md").read_text()):
            exec(block["source"], namespace)
            if block["name"]:
                picture = io.BytesIO()
                plt.gcf().savefig(picture, format="svg")
                files.append(File.generated(config, block["name"], content=picture.getvalue()))
    plt.close("all")
    return files
