"""Logging of a gateway that serves: in the format and from the level that the settings ask for."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.settings import Settings
from gateway.telemetry.logs.log_format import JsonFormat, TextFormat
from gateway.telemetry.logs.log_writer import LogWriter

STDERR = 2
OURS = ("gateway", "admission", "quotas", "backend")


@contextmanager
def logging_to(fd: int, settings: Settings) -> Iterator[None]:
    """Log to a file descriptor while the block runs. Libraries are heard from warnings on."""
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
    """Since the start, because nobody read them."""
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
