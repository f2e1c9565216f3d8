"""The pages of the documentation, and the code in them."""

import re
from pathlib import Path


ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
_BLOCK = re.compile(
    r"^```python\n(.*?)^```$(?:\n\n^```text\n(.*?)^```$)?(?:\n\n!\[[^]]*\]\((\S+\.svg)\))?",
    re.MULTILINE | re.DOTALL,
)


def blocks(path: Path):
    """Of each Python block, its line, its text, and the text and the picture that are shown as its
    output, or None.
    """
    text = path.read_text()
    for match in _BLOCK.finditer(text):
        yield text[: match.start(1)].count("\n"), match[1], match[2], match[3]
