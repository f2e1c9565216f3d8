"""The text that the example learns from, as bytes."""

import contextlib
import hashlib
import math
import sysconfig
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt8


# Not what people write: installed packages, tests (data, mostly) and generated tables.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}


def read_documents(path: Path | None) -> list[bytes]:
    """The distinct UTF-8 files at a path, or the standard library's sources, sorted by hash."""
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [f for f in root.rglob("*.py") if not SKIPPED & {*f.relative_to(root).parts}]
    elif path.is_dir():
        hidden = lambda f: any(part.startswith(".") for part in f.relative_to(path).parts)
        files = [f for f in path.rglob("*") if f.is_file() and not hidden(f)]
    else:
        files = [path]
    documents = {}
    for file in files:
        data = file.read_bytes()
        with contextlib.suppress(UnicodeDecodeError):
            data.decode()
            if data and b"\0" not in data:
                documents[hashlib.sha256(data).digest()] = data
    return [documents[digest] for digest in sorted(documents)]


def split(
    documents: list[bytes], share: float = 0.05
) -> tuple[UInt8[np.ndarray, "n"], UInt8[np.ndarray, "m"]]:
    """The bytes to train on and those held out. A zero byte starts each document.

    Whole documents are held out: the first, in the order given, that make up the share. Where they
    are too few or too long for that, it is the end of each.
    """
    total = sum(map(len, documents))
    training, held_out, size = [], [], 0
    for document in documents:
        if size < share * total and len(document) <= share * total:
            held_out.append(document)
            size += len(document)
        else:
            training.append(document)
    if size < share * total / 2:
        cuts = [len(document) - math.ceil(share * len(document)) for document in documents]
        training = [document[:cut] for document, cut in zip(documents, cuts)]
        held_out = [document[cut:] for document, cut in zip(documents, cuts)]
    join = lambda part: np.frombuffer(b"".join(b"\0" + document for document in part), np.uint8)
    return join(training), join(held_out)


def windows_at(
    text: UInt8[np.ndarray, "n"], starts: Int[np.ndarray, "w"], context: int
) -> UInt8[np.ndarray, "w context+1"]:
    """The windows of `context` bytes and the one after that begin at `starts`."""
    return text[starts[:, None] + np.arange(context + 1)]
