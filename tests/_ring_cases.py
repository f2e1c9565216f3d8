"""The cases of `test_ring.py`, on eight virtual devices; prints `name: ok`, or what went wrong."""

import sys

import _ring_contexts  # noqa: F401  (each of these adds its cases)
import _ring_programs  # noqa: F401
from _ring_common import CASES
from _ring_oracle import EVERYTHING


if __name__ == "__main__":
    for name, run in (EVERYTHING if "everything" in sys.argv else CASES).items():
        try:
            run()
            print(f"{name}: ok", flush=True)
        except Exception as e:
            print(f"{name}: {type(e).__name__} {e}".replace("\n", " "), flush=True)
