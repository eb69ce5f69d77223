"""The name of a replica in the store, kept on disk for its next life.

A dead replica's slices (slices.py) count as spent, because they may have been. Its next life can tell: the name is on
disk only while the store knows of all spending. So a replica that finds its name gives back the slices under it, and a
replica without one begins under a new name.
"""

import os
import re
import secrets
from contextlib import suppress
from fcntl import LOCK_EX, LOCK_NB, flock
from itertools import count
from pathlib import Path

LIFE_ORDINALS = 2**32  # of one life; the next life's are above them
_KEPT = re.compile(rb"([0-9a-f]{16}) ([0-9]{1,6})\n")


class ReplicaName:
    """A unique name, and the ordinal at which this life's counting begins."""

    def __init__(self) -> None:
        """A name that is not kept."""
        self.id = secrets.token_hex(8)
        self.first_ordinal = 0  # 0: it had no life before
        self._file: int | None = None

    @classmethod
    def kept_in(cls, directory: Path) -> "ReplicaName":
        """A dead process's name from this folder, else a new one stored there, if it is writable. Others may have names
        in the folder at the same time.
        """
        name = cls()
        with suppress(OSError):
            directory.mkdir(0o700, parents=True, exist_ok=True)
            name._file = _free_file(directory)
            kept = _KEPT.fullmatch(os.pread(name._file, 64, 0))
            if kept is not None:
                former, lives = kept[1].decode(), int(kept[2])
                name._write(b"%s %d\n" % (kept[1], lives + 1))
                name.id, name.first_ordinal = former, (lives + 1) * LIFE_ORDINALS
            else:
                name.keep()
        return name

    def give_up(self) -> bool:
        """Record on disk that spending unknown to the store begins; returns whether that succeeded."""
        try:
            self._write(b"")
        except OSError:
            return False
        return True

    def keep(self) -> None:
        """Record that the store knows all spending."""
        with suppress(OSError):
            self._write(b"%s %d\n" % (self.id.encode(), self.first_ordinal // LIFE_ORDINALS))

    def _write(self, content: bytes) -> None:
        if self._file is not None and os.pread(self._file, 64, 0) != content:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, content, 0)
            os.fsync(self._file)


def _free_file(directory: Path) -> int:
    """The first unlocked file of the folder, opened and locked for as long as this process lives."""
    for number in count():
        descriptor = os.open(directory / str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            flock(descriptor, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
        else:
            return descriptor
    raise AssertionError("numbers have no end")
