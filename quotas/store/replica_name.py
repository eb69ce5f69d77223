"""The name by which the store knows a replica, kept on disk so that its next life has it again.

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

LIFE_ORDINALS = 2**32  # of one life, so that those of the next are above them
_KEPT = re.compile(rb"([0-9a-f]{16}) ([0-9]{1,6})\n")


class ReplicaName:
    """A name that no other process has, and the ordinal from which on this life counts."""

    def __init__(self) -> None:
        """A name that is not kept."""
        self.id = secrets.token_hex(8)
        self.first_ordinal = 0  # 0: it had no life before
        self._file: int | None = None

    @classmethod
    def kept_in(cls, directory: Path) -> "ReplicaName":
        """Return the name that a process without a life had in this folder, else a new one that is kept there, as far
        as that can be written. Others may have names in the folder at the same time.
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
        """Note that something is about to be spent that the store does not know; return whether that is on the disk."""
        try:
            self._write(b"")
        except OSError:
            return False
        return True

    def keep(self) -> None:
        """Note that the store knows all that was spent."""
        with suppress(OSError):
            self._write(b"%s %d\n" % (self.id.encode(), self.first_ordinal // LIFE_ORDINALS))

    def _write(self, content: bytes) -> None:
        if self._file is not None and os.pread(self._file, 64, 0) != content:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, content, 0)
            os.fsync(self._file)


def _free_file(directory: Path) -> int:
    """Return the first file of the folder that no process has, opened and locked for as long as this one lives."""
    for number in count():
        descriptor = os.open(directory / str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            flock(descriptor, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
        else:
            return descriptor
    raise AssertionError("numbers have no end")
