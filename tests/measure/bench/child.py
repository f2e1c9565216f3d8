"""`python -m measure.bench.child` measures cases and prints their rows, as JSON lines."""

import json
import sys

from .cases import Case
from .measure import measure, pin


def main() -> None:
    """Reads the job, a JSON object, from standard input."""
    job = json.load(sys.stdin)
    for case in map(Case.from_dict, job["cases"]):
        pin(job["core"], case.cores)
        for row in measure(case, job["rounds"], job["peers"]):
            print(json.dumps({"row": row.to_dict()}), flush=True)
        print(json.dumps({"done": case.name}), flush=True)


if __name__ == "__main__":
    main()
