"""The tests of tests/unit/problem with all of their values, and what takes longer."""

import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "problem"))
