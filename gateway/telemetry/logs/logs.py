"""Sets up the logging of a serving gateway, in the configured format and level."""

import logging
import os
import select
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import SecretStr

from gateway.key_mask import hide
from gateway.settings.settings import Settings
from gateway.telemetry.logs.log_format import JsonFormat, TextFormat

log = logging.getLogger(__name__)

MAX_PENDING_BYTES = 4 * 2**20
GATHER_SECONDS = 0.02  # lines within this time share one write
CLOSE_SECONDS = 2.0
TOO_SLOW = "stderr was not read fast enough"


class LogWriter(logging.Handler):
    """Writes log lines to a file descriptor from a thread of its own.

    While the reader stands still, lines beyond `max_pending_bytes` are dropped and counted, as are lines that cannot be
    written. Their number and the reason are logged once a line is written again.
    """

    def __init__(self, fd: int, max_pending_bytes: int = MAX_PENDING_BYTES) -> None:
        super().__init__()
        self.num_dropped = 0
        self._fd = fd
        self._max_pending_bytes = max_pending_bytes
        self._num_reported = 0  # of the dropped lines
        self._reason = TOO_SLOW  # why lines were dropped last
        self._lines: deque[bytes] = deque()
        self._pending_bytes = 0
        self._counting = threading.Lock()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sluice-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception as error:  # noqa: BLE001 - of a library's message, perhaps; its caller cannot help it
            where = f"{record.pathname}:{record.lineno}"
            text = self.format(_replaced(record, f"a line of {where} cannot be written ({type(error).__name__})"))
        line = (text + "\n").encode("utf-8", "backslashreplace")
        with self._counting:
            if self._pending_bytes + len(line) > self._max_pending_bytes:
                self.num_dropped += 1
                return
            self._pending_bytes += len(line)
            self._lines.append(line)
        if not self._wake.is_set():
            self._wake.set()

    def close(self) -> None:
        """Write the lines that are left, within `CLOSE_SECONDS`."""
        self._closing.set()
        self._wake.set()
        self._thread.join(CLOSE_SECONDS)
        super().close()

    def _run(self) -> None:
        while not (self._closing.is_set() and not self._lines):
            self._wake.wait()
            self._closing.wait(GATHER_SECONDS)
            self._wake.clear()
            self._write_pending()

    def _write_pending(self) -> None:
        with self._counting:
            lines, self._lines = self._lines, deque()
        data = b"".join(lines)
        try:
            _write_all(self._fd, data)
            lost = 0
        except OSError as error:  # the reader has gone, or a disk is full
            lost, self._reason = len(lines), f"stderr could not be written ({error.strerror})"
        with self._counting:
            self._pending_bytes -= len(data)
            self.num_dropped += lost
        if not lost and (news := self.num_dropped - self._num_reported) > 0:
            self._num_reported += news
            log.warning("%d log lines were dropped: %s", news, self._reason)
            self._reason = TOO_SLOW


def _replaced(record: logging.LogRecord, message: str) -> logging.LogRecord:
    return logging.LogRecord(record.name, record.levelno, record.pathname, record.lineno, message, None, None)


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:
            select.select((), (fd,), ())


STDERR = 2
OURS = ("fleet", "gateway", "admission", "quotas", "backend")


@contextmanager
def logging_to(fd: int, settings: Settings) -> Iterator[None]:
    """Log to a file descriptor while the block runs, with the secrets of these settings masked; libraries log from
    warnings on.
    """
    hide(secret.get_secret_value() for _, secret in settings if isinstance(secret, SecretStr))
    level = logging.getLevelNamesMapping()[_level(settings)]
    writer = LogWriter(fd)
    writer.setFormatter(_format(settings, os.isatty(fd)))
    root = logging.getLogger()
    levels = {root: max(level, logging.WARNING)} | {logging.getLogger(name): level for name in OURS}
    before = {logger: logger.level for logger in levels}
    root.addHandler(writer)
    _set(levels)
    logging.captureWarnings(True)
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False  # no line has them
    try:
        yield
    finally:
        logging.logThreads = logging.logProcesses = logging.logMultiprocessing = True
        logging.captureWarnings(False)
        _set(before)
        root.removeHandler(writer)
        writer.close()


def num_lines_dropped() -> int:
    """The number of log lines dropped since the start because stderr was not read."""
    return sum(handler.num_dropped for handler in logging.getLogger().handlers if isinstance(handler, LogWriter))


def _set(levels: dict[logging.Logger, int]) -> None:
    for logger, level in levels.items():
        logger.setLevel(level)


def _level(settings: Settings) -> str:
    chosen = ("debug" if settings.dev else "info") if settings.log_level == "auto" else settings.log_level
    return chosen.upper()


def _format(settings: Settings, is_terminal: bool) -> logging.Formatter:
    if settings.log_format == "text" or (settings.log_format == "auto" and (is_terminal or settings.dev)):
        return TextFormat(settings.dev, colour=is_terminal and "NO_COLOR" not in os.environ)
    return JsonFormat(settings.dev)
