"""What the devices of a compiled program send each other."""

import re

import numpy as np


NAMES = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"


def moved(program):
    """The exchanges of a program, and how many bytes their results have."""
    found = re.findall(rf"= (.*?) ({NAMES})(?:-start)?\(", program.as_text())
    count = lambda text: sum(
        int(re.sub(r"\D", "", dtype)) // 8 * int(np.prod([int(x) for x in shape.split(",") if x]))
        for dtype, shape in re.findall(r"([a-z]+\d+)\[([\d,]*)\]", text)
    )
    return {name for _, name in found}, sum(count(shapes) for shapes, _ in found)
