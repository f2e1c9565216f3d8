"""Formulas become MathML when the site is built, so that pages need no script to show them."""

import re
from html import unescape

from latex2mathml.converter import convert


_FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<tex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL
)


def _mathml(match: re.Match) -> str:
    tag = match["tag"]
    display = "block" if tag == "div" else "inline"
    return f"<{tag}>{convert(unescape(match['tex']).strip(), display=display)}</{tag}>"


def on_page_content(html: str, **kwargs) -> str:
    del kwargs
    return _FORMULA.sub(_mathml, html)
