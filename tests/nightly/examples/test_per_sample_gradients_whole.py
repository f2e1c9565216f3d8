"""The example: gradients of samples and Hessian-vector products agree with Dense, in less memory."""

import re

import jax
import per_sample_gradients as example


def test_results_agree_in_less_memory(capsys):
    with jax.numpy_dtype_promotion("standard"):  # for optax
        assert example.main(["--quick"]) == 0
    captured = capsys.readouterr()
    for title in ("training", "power iteration", "planning memory"):
        assert f"{title}: 100%" in captured.err
    found = re.search(r"^(\d) of 8 wrong labels are among", captured.out, re.MULTILINE)
    assert found is not None and int(found[1]) >= 6
    apart = [float(x) for x in re.findall(r" (\S+) apart$", captured.out, re.MULTILINE)]
    assert len(apart) == 4 and max(apart) < 1e-5
    rows = re.findall(r"^(\w.*?)  +(\d+\.\d) +(\d+\.\d)$", captured.out, re.MULTILINE)
    assert len(rows) == 3
    assert all(float(ours) < float(dense) / 3 for _, ours, dense in rows)
    assert captured.out.endswith("results agree\n")
