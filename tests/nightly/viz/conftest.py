"""The tests of tests/unit/viz with all of their values."""

import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "viz"))
