"""The tests of tests/unit/examples that take long, and those of whole programs."""

import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "examples"))
