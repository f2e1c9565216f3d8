"""The tour: each mask and score agrees with its matrix, and masks skip what they can."""

import re

import custom_mask_and_score as example


def test_all_cases_agree_and_skip(capsys):
    assert example.main(["--quick", "--draw"]) == 0
    captured = capsys.readouterr()
    assert "10/10" in captured.err
    found = re.findall(r"^(\w.*?)  +(\d+)% +(\S+) +(\S+)$", captured.out, re.MULTILINE)
    assert [name for name, *_ in found] == [case.name for case in example.cases(256)]
    assert max(float(x) for row in found for x in row[2:]) < example.TOLERANCE
    skipped = {name: int(share) for name, share, *_ in found}
    causal = round(100 * 120 / 256)  # of 16 x 16 blocks, those above the diagonal
    for name in ("causal", "soft cap", "ALiBi, its slopes learned", "yours: fading, learned"):
        assert skipped.pop(name) == causal
    assert min(skipped.values()) > causal + 10  # the others' own masks skip, too
    assert captured.out.count("256 queries (down) x 256 keys") >= 2
    assert captured.out.endswith("all agree\n")
