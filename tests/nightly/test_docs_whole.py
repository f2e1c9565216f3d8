"""The pages that show whole models run."""

import pytest
import test_docs as unit
from test_docs import MODELS, quick_compilation, RUN  # noqa: F401, a fixture


@pytest.mark.parametrize("path", [p for p in RUN if p.stem in MODELS], ids=lambda p: p.stem)
@pytest.mark.usefixtures("quick_compilation")
def test_blocks_run(path, monkeypatch, capsys, request):
    unit.test_blocks_run(path, monkeypatch, capsys, request)
