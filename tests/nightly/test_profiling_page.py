"""The page on profiles is true; it runs in a process that has no other device than the CPU."""

import os
import subprocess
import sys

from _pages import blocks, ROOT


def test_the_page_runs():
    found = list(blocks(ROOT / "docs" / "pages" / "profiling.md"))
    env = os.environ | dict(JAX_PLATFORMS="cpu", PYTHONPATH=str(ROOT))
    done = subprocess.run(
        [sys.executable, "-c", "".join(source for _, source, *_ in found)],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    table, (shown,) = done.stdout, [shown for *_, shown, _ in found if shown]
    assert table.endswith(shown) and table.count(" ms\n") == 8
