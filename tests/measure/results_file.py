"""Files of measured figures: rows in JSON, and a header that says what they were measured with."""

import argparse
import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar


R = TypeVar("R")


def new_file(text: str) -> Path:
    """The path of a file that a command is to write, as a `type` of `argparse`. If it cannot be
    written, that is an error before the command measures anything.
    """
    path = Path(text)
    if not path.name:
        raise argparse.ArgumentTypeError(f"{text!r} names no file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written")
    return path


@dataclasses.dataclass(frozen=True)
class RowFile(Generic[R]):
    """The format of a command's file: its name for the header, and a function that makes a row of a
    dictionary.
    """

    command: str
    header: str
    make: Callable[[dict[str, Any]], R]

    def write(self, rows: Iterable[Any], measured_with: Mapping[str, Any], path: Path) -> None:
        """Writes JSON: the header, and one line for every row."""
        header = json.dumps({self.header: measured_with})
        lines = ",\n".join(json.dumps(row.to_dict()) for row in rows)
        path.write_text(f'{header[:-1]},\n"rows": [\n{lines}\n]}}\n')

    def read(self, path: Path) -> tuple[list[R], dict[str, Any]]:
        """Reads the rows and the header. **Raises:** `ValueError` if `write` did not write them."""
        try:
            data = json.loads(path.read_text())
            return [self.make(row) for row in data["rows"]], data[self.header]
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise ValueError(
                f"{path} was not written by `python tests/measure {self.command}`."
            ) from e
