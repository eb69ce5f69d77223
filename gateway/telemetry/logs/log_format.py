"""Formats log records: as one JSON object a line for machines, or as lines for people.

A record may carry `fields`, a dict of values besides its message, and `discreet`, which is true if its exception was
raised while a client's bytes were read, so that its message may quote a prompt.
"""

import json
import logging
import traceback
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import orjson

from gateway.key_mask import masked

_COLOURS = {"WARNING": "\033[33m", "ERROR": "\033[31m", "CRITICAL": "\033[1;31m"}
_DIM, _PLAIN = "\033[2m", "\033[0m"


class _Format(logging.Formatter):
    """The base of both formats; with `quotes`, messages of exceptions are shown even in discreet records."""

    def __init__(self, quotes: bool = False) -> None:
        super().__init__()
        self._quotes = quotes

    def exception(self, record: logging.LogRecord) -> str | None:
        """Returns the traceback of a record's exception; None if it has none."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return None
        if self._quotes or not getattr(record, "discreet", False):
            return "".join(traceback.format_exception(error)).rstrip()
        return unquoted(error)


class JsonFormat(_Format):
    """Writes an object with time (RFC 3339, UTC), level, logger, message, the record's fields, and any exception."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": f"{_second(int(record.created))}.{int(record.created % 1 * 1000):03}+00:00",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= getattr(record, "fields", {})
        if exception := self.exception(record):
            entry["exception"] = exception
        return masked(_json(entry))


class TextFormat(_Format):
    """Writes local time, level, message and fields. Further lines are indented, so that no text can forge a line."""

    def __init__(self, quotes: bool = False, colour: bool = False) -> None:
        super().__init__(quotes)
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S.%f")[:-3]
        level = self._in(_COLOURS.get(record.levelname), f"{record.levelname:<8}")
        parts = [self._in(_DIM, moment), level, _printable(record.getMessage()), self._in(_DIM, _fields(record))]
        lines = [" ".join(part for part in parts if part)]
        if exception := self.exception(record):
            lines.append(_printable(exception))
        return masked("\n    ".join(lines))

    def _in(self, colour: str | None, text: str) -> str:
        return f"{colour}{text}{_PLAIN}" if self._colour and colour and text else text


def unquoted(error: BaseException) -> str:
    """Returns the frames and classes of an exception and its causes, without their messages."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    before = [unquoted(cause), ""] if cause is not None else []
    frames = "".join(traceback.format_tb(error.__traceback__))
    return "\n".join([*before, f"{frames}{type(error).__module__}.{type(error).__qualname__}"])


@lru_cache(maxsize=1)
def _second(unix: int) -> str:
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _json(entry: dict[str, Any]) -> str:
    try:
        return orjson.dumps(entry, default=str).decode()
    except TypeError:  # a lone surrogate, or a number beyond 64 bits
        return json.dumps(entry, default=str)


def _fields(record: logging.LogRecord) -> str:
    fields: dict[str, Any] = getattr(record, "fields", {})
    return " ".join(f"{name}={_shown(value)}" for name, value in fields.items() if value is not None)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if text.isprintable() and " " not in text and text else repr(text)


def _printable(text: str) -> str:
    """Returns the text without control characters, with further lines indented."""
    lines = text.split("\n")
    return "\n    ".join(line if line.isprintable() else repr(line)[1:-1] for line in lines)
