"""The machine code in a program that XLA compiled for NVIDIA GPUs and serialized.

Such a program is a file of records (the format is called Riegeli), and may have another one inside.
A record is compressed (by Snappy) where that makes it smaller. Nothing here is checked: what does
not look like machine code is passed over.
"""

import contextlib
import struct
from collections.abc import Iterator


_BEGIN = bytes.fromhex("83af70d10d884a3f")
"""The bytes with which a file of records begins."""

_PAGE, _HEADER = 1 << 16, 24
"""The bytes of a page and of a header. A file has a header at the start of each page."""

_ELF = b"\x7fELF\x02\x01\x01"


def cubins(program: bytes) -> list[bytes]:
    """The pieces of machine code, each once, in the order in which they lie."""
    # What lies in a file of records is read without the headers of its pages.
    found, at = [*_elves(program.partition(_BEGIN)[0])], 0
    while (at := program.find(_BEGIN, at)) >= 0:
        file = program[at:]
        pages = range(0, len(file), _PAGE)
        records = b"".join(file[i + _HEADER : i + _PAGE] for i in pages)
        found += cubins(records) + [x for part in _compressed(records) for x in _elves(part)]
        at += len(_BEGIN)
    return list(dict.fromkeys(found))


def _elves(data: bytes) -> Iterator[bytes]:
    """The pieces of machine code that lie in data as they are."""
    at = -1
    while (at := data.find(_ELF, at + 1)) >= 0:
        head = data[at : at + 64]
        if len(head) < 64:
            return
        segments, sections = struct.unpack_from("<QQ", head, 32)
        of_segment, count_segments, of_section, count_sections = struct.unpack_from(
            "<HHHH", head, 54
        )
        end = max(segments + of_segment * count_segments, sections + of_section * count_sections)
        if 64 < end <= len(data) - at:
            yield data[at : at + end]


def _compressed(records: bytes) -> Iterator[bytes]:
    """The records that were compressed. Before one is an `s`, the sizes, and its length.

    Bytes of the sizes may look like a compressed record, too. So of all that lie near an `s`, this
    is the one that ends last.
    """
    at = 0
    while (at := records.find(b"s", at)) >= 0:
        at += 1
        found = []
        for begin in range(at, min(at + 24, len(records))):
            with contextlib.suppress(ValueError, IndexError):
                if 2000 < _number(records, begin)[0] < 1 << 28:
                    data, end = _expanded(records, begin)
                    found += [(end, data)] if _ELF in data else []
        if found:
            at, data = max(found)
            yield data


def _number(data: bytes, at: int) -> tuple[int, int]:
    """A number in groups of 7 bits, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
        if byte < 128:
            return value, at


def _expanded(data: bytes, at: int) -> tuple[bytes, int]:
    """What Snappy compressed, and where it ends. **Raises:** `ValueError` if that is not so."""
    size, at = _number(data, at)
    out = bytearray()
    while len(out) < size:
        tag, at = data[at], at + 1
        if tag & 3 == 0:
            length = tag >> 2
            if length >= 60:
                n = length - 59
                length, at = int.from_bytes(data[at : at + n], "little"), at + n
            out += data[at : at + length + 1]
            at += length + 1
            continue
        near, n = tag & 3 == 1, (1, 2, 4)[(tag & 3) - 1]
        length = ((tag >> 2) & 7) + 4 if near else (tag >> 2) + 1
        back = int.from_bytes(data[at : at + n], "little") + ((tag >> 5) << 8 if near else 0)
        at += n
        if not 0 < back <= len(out):
            raise ValueError("not compressed")
        piece = bytes(out[len(out) - back :])
        out += (piece * (length // back + 1))[:length]
    if len(out) != size:
        raise ValueError("not compressed")
    return bytes(out), at
