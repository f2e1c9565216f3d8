"""What is here takes minutes. It has the tests of tests/unit with all of their values."""

import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
