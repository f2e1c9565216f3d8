"""`python -m eqattn._bench.child`: measures cases and prints their rows, as JSON lines."""

import json
import sys

from . import measure
from .cases import ACCURACY, CASES, choose


def main() -> None:
    """Reads the job, a JSON object, from standard input."""
    job = json.load(sys.stdin)
    measure.pin(job["core"])
    names = {c.name for c in (*CASES, *ACCURACY)}
    for accuracy in (False, True):
        wanted = [n for n in job["cases"] if n in names and n.startswith("accuracy") == accuracy]
        cases = choose(wanted, job["quick"], accuracy) if wanted else []
        for case in cases:
            if case.name not in wanted:
                continue
            for row in measure.measure(case, job["rounds"], job["peers"]):
                print(json.dumps({"row": row.to_dict()}), flush=True)
            print(json.dumps({"done": case.name}), flush=True)


if __name__ == "__main__":
    main()
