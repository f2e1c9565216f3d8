"""A ring over four processes."""

import ring.test_processes as unit


def test_four_processes_as_one_device(tmp_path):
    unit.test_as_one_device(4, tmp_path)
