"""The tests of tests/unit/cache with all their values, of which the default run takes few."""

import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "cache"))
