"""eqattn as mypy sees it."""

import sys

from test_typing import errors, ROOT, run, this_checkout, write_consumer  # noqa: F401, a fixture


def mypy(folder, env):
    flags = "--strict", "--follow-imports=silent", "--cache-dir", folder / "cache"
    env = {**env, "MYPYPATH": str(ROOT)}
    return run("mypy", *flags, "--python-executable", sys.executable, ".", cwd=folder, env=env)


def test_a_consumer_with_mypy(tmp_path, this_checkout):  # noqa: F811
    wrong = write_consumer(tmp_path)
    done = mypy(tmp_path, this_checkout)
    assert errors(done) == wrong, done.stdout
