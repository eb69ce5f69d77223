"""Writes the core's event log to disk, in segments of bounded size, and reads it back."""

import errno
import gzip
import logging
import os
import threading
import zlib
from collections.abc import Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

log = logging.getLogger(__name__)

GZIP_MAGIC = b"\x1f\x8b"  # RFC 1952, 2.3.1
MAX_LINE_CHARS = 2**26  # the longest lines hold a policy
UNREADABLE = (OSError, EOFError, zlib.error, UnicodeDecodeError)
"""Errors of reading a text file that is absent, cut off, damaged or no text."""
FLUSH_SECONDS = 0.5  # the longest that a line waits to be written
CLOSE_SECONDS = 5.0  # for the last lines
MAX_WAITING_LINES = 250_000  # that a disk has not taken yet: some 50 MB, and minutes of a busy engine


class EventLogError(Exception):
    """An event log cannot be written or read, or lacks the request; the message names it."""


class EventLogFile:
    """Appends lines to PATH; a full segment becomes PATH.1, the one before it PATH.2, and so on up to `keep`.

    A replay needs every segment since the start; `explain` reads the segments that are left. If the log cannot be
    written any more, because the disk is full for instance, it ends there and the gateway serves on without one.

    A thread writes the lines together, every `FLUSH_SECONDS`, so that the engine never waits for a disk.
    """

    def __init__(self, path: Path, segment_bytes: int, keep: int = 8) -> None:
        """Begin a new log, after rotating an earlier run's at PATH. Raises `EventLogError`."""
        self._lines: list[str] = []  # to be written: one thread appends, the writer takes from the front
        self._path = path
        self._segment_bytes = segment_bytes
        self._keep = keep
        self._written = 0
        self._closing = threading.Event()
        self._is_cut = False  # a line was dropped, and so are all behind it
        self._has_ended = False  # and was told: a stuck writer may yet fail, in a log that was given up
        try:
            if path.exists() and path.stat().st_size:
                self._rotate()
            self._file = self._open()
        except OSError as error:
            raise EventLogError(
                f"the event log {path} cannot be written: {error.strerror}; name another file with --event-log"
            ) from None
        self._writer = threading.Thread(target=self._write_until_closing, name="event-log", daemon=True)
        self._writer.start()

    def write(self, line: str) -> None:
        """Append a whole line, without its end. The log ends if a disk has not taken `MAX_WAITING_LINES`."""
        self._is_cut |= len(self._lines) == MAX_WAITING_LINES
        if not self._is_cut:
            self._lines.append(line)

    def _write_until_closing(self) -> None:
        while not self._closing.wait(FLUSH_SECONDS):
            self._write_lines()
        self._write_lines()
        try:
            self._file.close()
        except OSError as unwritten:
            self._give_up(unwritten)

    def _write_lines(self) -> None:
        """Write the pending lines; once the log has ended, they are dropped."""
        is_cut, lines = self._is_cut, self._lines[:]
        if lines and not self._file.closed:
            together = "\n".join(lines)
            fits = self._written + len(together) < self._segment_bytes
            try:
                for line in [together] if fits else lines:
                    self._append(line)
                if is_cut:
                    raise OSError(errno.EBUSY, f"the disk has not taken {MAX_WAITING_LINES} lines in time")
            except OSError as error:
                self._give_up(error)
        del self._lines[: len(lines)]

    def _append(self, line: str) -> None:
        if self._written + len(line) >= self._segment_bytes and self._written:
            self._file.close()
            self._rotate()
            self._file = self._open()
        left = memoryview(f"{line}\n".encode())
        while left:
            left = left[self._file.write(left) or 0 :]
        self._written += len(line) + 1

    def _give_up(self, error: OSError) -> None:
        self._tell_end(error)
        with suppress(OSError):
            self._file.close()

    def _tell_end(self, error: OSError) -> None:
        if not self._has_ended:
            self._has_ended = True
            log.error("the event log %s ends here, and the gateway serves on without it: %s", self._path, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closing.set()
        self._writer.join(CLOSE_SECONDS)
        if self._writer.is_alive():
            self._tell_end(OSError(errno.EBUSY, f"the disk has not taken its last lines in {CLOSE_SECONDS:g} s"))

    def _open(self) -> FileIO:
        self._written = 0
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        os.fchmod(descriptor, 0o600)  # an empty file may have had other permissions
        return FileIO(descriptor, "w")  # unbuffered: a buffer that the writer holds would abort an exit

    def _rotate(self) -> None:
        for number in range(self._keep - 1, 0, -1):
            older = _segment(self._path, number)
            if older.exists():
                older.replace(_segment(self._path, number + 1))
        self._path.replace(_segment(self._path, 1))


def read_event_log(path: Path) -> Iterator[str]:
    """Yields the lines of the newest run at PATH, from its oldest remaining segment. Raises `EventLogError`.

    An incomplete last line is left out. Segments may be compressed with gzip.
    """
    try:
        for segment in _segments(path):
            with open_text(segment) as file:
                while line := file.readline(MAX_LINE_CHARS):
                    if len(line) == MAX_LINE_CHARS:
                        raise EventLogError(
                            f"{segment} has a line of {MAX_LINE_CHARS} characters or more: it is damaged"
                        )
                    if line.endswith("\n"):
                        yield line.rstrip("\n")
    except UnicodeDecodeError:
        raise EventLogError(f"{path} is no event log: it is no UTF-8 text") from None
    except UNREADABLE as error:
        raise EventLogError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _segments(path: Path) -> list[Path]:
    """Returns the segments of the newest run, the oldest first."""
    segments = [path]
    while not _begins_a_log(segments[-1]) and (older := _segment(path, len(segments))).exists():
        segments.append(older)
    return segments[::-1]


def _begins_a_log(segment: Path) -> bool:
    """True for the first segment of a log. Raises `EventLogError` if it is no segment at all."""
    with open_text(segment, errors="replace") as file:
        first = file.readline(MAX_LINE_CHARS)
    if first and not first.startswith('["'):
        raise EventLogError(f"{segment} is no event log: it begins with {first!r:.80}")
    return first.startswith('["log"')


def _segment(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def open_text(path: Path, newline: str | None = None, errors: str = "strict") -> TextIO:
    """Open a file of UTF-8, with or without a byte order mark. The first bytes tell whether it is compressed."""
    with path.open("rb") as file:
        is_compressed = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
    if is_compressed:
        return gzip.open(path, "rt", encoding="utf-8-sig", errors=errors, newline=newline)
    return path.open(encoding="utf-8-sig", errors=errors, newline=newline)
