"""Files of text as people keep them: as they are, or compressed with gzip."""

import gzip
import zlib
from pathlib import Path
from typing import TextIO

_GZIP = b"\x1f\x8b"  # RFC 1952, 2.3.1

UNREADABLE = (OSError, EOFError, zlib.error, UnicodeDecodeError)
"""What reading such a file may raise, when it is not there, cut off, damaged or no text."""


def open_text(path: Path, newline: str | None = None, errors: str = "strict") -> TextIO:
    """UTF-8, with or without a byte order mark; compression is told by the first bytes, not by the name."""
    with path.open("rb") as file:
        is_compressed = file.read(len(_GZIP)) == _GZIP
    if is_compressed:
        return gzip.open(path, "rt", encoding="utf-8-sig", errors=errors, newline=newline)
    return path.open(encoding="utf-8-sig", errors=errors, newline=newline)
