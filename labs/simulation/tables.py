"""Reads requests from a table: a CSV whose header names its columns, by a known layout or by `--columns`.

`azure`     TIMESTAMP, ContextTokens, GeneratedTokens: the Azure LLM inference traces of 2023 (Patel et al., 2024) and
            of 2024 (Stojkovic et al., 2025), whose timestamps have a zone
`vidur`     arrived_at, num_prefill_tokens, num_decode_tokens: traces of the simulator Vidur (Agrawal et al., 2024)
`servegen`  timestamp, input_tokens, output_tokens: workloads of ServeGen (Xiang et al., 2025), and of many a program

A table of any layout may have columns that are named like the other fields of `FIELDS`, and a table of no layout may
have the names of fields alone: time or milliseconds, prompt, output. Columns of no field are not simulated, and the
reader names them.
"""

import csv
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import TextIO
from zlib import crc32

from backend.scheduler.sequence import SPARE_CLASS
from gateway.quoting import quoted
from labs.simulation.arrival import Arrival
from labs.simulation.errors import OptionError, TraceError

FIELDS = {
    "time": "seconds, or a date and a time",
    "milliseconds": "instead of time",
    "prompt": "tokens",
    "output": "tokens",
    "tenant": "name",
    "class": "number, 0 the most urgent",
    "service_tier": "name, or nothing",
    "session": "number or name, what tenants by hash go by",
    "max_tokens": "tokens that the request declares",
    "deadline": "seconds to the first token",
    "done_within": "seconds to the last token",
}
LAYOUTS = {
    "azure": {"time": "TIMESTAMP", "prompt": "ContextTokens", "output": "GeneratedTokens"},
    "vidur": {"time": "arrived_at", "prompt": "num_prefill_tokens", "output": "num_decode_tokens"},
    "servegen": {"time": "timestamp", "prompt": "input_tokens", "output": "output_tokens"},
}
_TIMES = ("time", "milliseconds")
_NEEDED = ("prompt", "output")
_OWN = [{name: name for name in (time, *_NEEDED)} for time in _TIMES]  # a table may have fields for headings
_OPTIONAL = tuple(name for name in FIELDS if name not in (*_TIMES, *_NEEDED))

_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)?")
_NUMBER = re.compile(r"\s*\d{1,15}\s*")
MAX_HEADER_CHARS = 200  # shown of an unknown header
_MAX_VALUE = 10**15 - 1  # tokens or milliseconds

Columns = Mapping[str, str]  # by field, the heading of its column
NO_COLUMNS: Columns = {}


def parse_columns(text: str) -> Columns:
    """Reads a value of `--columns`: `time=Timestamp,prompt=Request tokens,output=Response tokens,tenant=user`.

    Raises `OptionError`.
    """
    columns: dict[str, str] = {}
    for part in text.split(","):
        field, _, heading = (side.strip() for side in part.partition("="))
        if field not in FIELDS:
            near = get_close_matches(field, FIELDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"fields are {', '.join(FIELDS)}"
            raise OptionError("--columns", part, f"there is no field {field}: {hint}")
        if not heading:
            raise OptionError("--columns", part, "write FIELD=COLUMN, such as prompt=ContextTokens")
        if field in columns or heading in columns.values():
            raise OptionError("--columns", text, f"{field if field in columns else heading} is given twice")
        columns[field] = heading
    if len(columns.keys() & {*_TIMES}) > 1:
        raise OptionError("--columns", text, "a request comes at its time or its milliseconds, not both")
    return columns


@dataclass(slots=True)
class Table:
    """A table that is read row by row; `columns` and `unread` are known once the header was read."""

    path: Path
    columns: Columns
    unread: tuple[str, ...]  # headings of unused columns
    rows: "csv.DictReader[str]"

    @classmethod
    def open(cls, path: Path, file: TextIO, layout: str | None, given: Columns) -> "Table":
        """Read the header of a table.

        The columns are the given ones, and for other fields the layout's, or the ones named like a field. Without a
        `layout` the headings decide. Raises `OptionError` for a missing given column, and `TraceError` if needed ones
        are unknown.
        """
        rows = csv.DictReader(file, strict=True)
        try:
            headings = [heading.strip() for heading in rows.fieldnames or ()]
        except csv.Error as error:
            raise TraceError(path, 1, f"not CSV: {error}") from None
        rows.fieldnames = headings
        for heading in given.values():
            if heading not in headings:
                near = get_close_matches(heading, headings, n=1)
                hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(headings)}"
                raise OptionError("--columns", heading, f"{path} has no such column: {hint}")
        columns = _known(path, headings, layout, given) | dict(given)
        twice = {heading for heading in columns.values() if headings.count(heading) > 1}
        if twice:
            raise TraceError(path, 1, f"the header has {', '.join(sorted(twice))} twice")
        unread = tuple(heading for heading in headings if heading not in columns.values())
        return cls(path, columns, unread, rows)

    def arrivals(self) -> Iterator[Arrival]:
        """Yields the requests. Raises `TraceError`."""
        try:
            for row in self.rows:
                yield _Row(self.path, self.rows.line_num, self.columns, row).arrival()
        except csv.Error as error:
            raise TraceError(self.path, self.rows.line_num, f"not CSV: {error}") from None


def _known(path: Path, headings: Sequence[str], layout: str | None, given: Columns) -> dict[str, str]:
    """The columns of the fields that were not given."""
    optional = {name: name for name in _OPTIONAL if name in headings and name not in given}
    for columns in [*LAYOUTS.values(), *_OWN] if layout is None else [LAYOUTS[layout]]:
        needed = {name: column for name, column in columns.items() if not _is_given(name, given)}
        if all(column in headings and column not in given.values() for column in needed.values()):
            return {name: name for name in optional if name not in needed.values()} | needed
    if layout is not None:
        missing = [column for column in LAYOUTS[layout].values() if column not in headings]
        raise TraceError(path, 1, f"the header lacks {', '.join(missing)}")
    if not any(headings):
        raise TraceError(path, 1, "no header is here: is the file empty?")
    shown = quoted(", ".join(headings), MAX_HEADER_CHARS)
    if any(map(_is_value, headings)):
        first = ", ".join(_OWN[0])
        raise TraceError(path, 1, f"{shown} are values: the first line has the names of the columns, such as {first}")
    layouts = "; ".join(", ".join(columns.values()) for columns in [*LAYOUTS.values(), *_OWN])
    raise TraceError(path, 1, f"the header {shown} is of no known layout ({layouts}): --columns says what a column is")


def _is_value(heading: str) -> bool:
    """True of a number or a time."""
    with suppress(ValueError):
        return isfinite(seconds_of(heading))
    return False


def _is_given(name: str, given: Columns) -> bool:
    return name in given or (name in _TIMES and not given.keys().isdisjoint(_TIMES))


@dataclass(frozen=True, slots=True)
class _Row:
    """One row, with the names of its fields for errors."""

    path: Path
    line: int
    columns: Columns
    values: Mapping[str, str | None]

    def arrival(self) -> Arrival:
        level = self._class() if self._text("class") else None
        session = self._text("session")
        return Arrival(
            time=self._moment(),
            prompt_tokens=self._count("prompt"),
            output_tokens=self._count("output"),
            session=crc32(session.encode()) if session else self.line,
            tenant=self._text("tenant"),
            priority_class=level or 0,
            max_tokens=self._count("max_tokens") if self._text("max_tokens") else 0,
            deadline=self._seconds("deadline"),
            done_within=self._seconds("done_within"),
            service_tier=self._text("service_tier") or None,
            asked_class=level,
        )

    def _text(self, name: str) -> str:
        """The row's text of an optional field; empty without its column."""
        return (self.values.get(self.columns[name]) or "").strip() if name in self.columns else ""

    def _moment(self) -> float:
        if "milliseconds" in self.columns:
            return self._number("milliseconds", float) / 1000
        return self._number("time", seconds_of)

    def _seconds(self, name: str) -> float | None:
        return self._number(name, _positive) if self._text(name) else None

    def _number(self, name: str, read: Callable[[str], float]) -> float:
        heading = self.columns[name]
        value = self.values[heading]
        try:
            number = read(value or "")
            if isfinite(number):
                return number
        except ValueError:
            pass
        form = {
            "time": "YYYY-MM-DD HH:MM:SS.f, with a zone such as +00:00 or none, or seconds",
            "milliseconds": "a number",
        }.get(name, "a number of seconds above 0")
        raise TraceError(self.path, self.line, f"{heading} must be {form}, got {value!r:.40}")

    def _class(self) -> int:
        level = self._count("class", at_least=0)
        if level > SPARE_CLASS:
            reason = f"must be at most {SPARE_CLASS}, got {level}: number the classes from 0, the most urgent, on"
            raise TraceError(self.path, self.line, f"{self.columns['class']} {reason}")
        return level

    def _count(self, name: str, at_least: int = 1) -> int:
        heading = self.columns[name]
        return count_of(self.path, self.line, heading, self.values[heading], at_least)


def count_of(path: Path, line: int, name: str, value: object, at_least: int) -> int:
    """A whole number, also as text. Raises `TraceError`."""
    number = int(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value
    if isinstance(number, int) and not isinstance(number, bool) and at_least <= number <= _MAX_VALUE:
        return number
    reason = f"must be an integer of at least {at_least} and at most 15 digits"
    raise TraceError(path, line, f"{name} {reason}, got {'nothing' if value is None else f'{value!r:.40}'}")


def seconds_of(text: str) -> float:
    """Returns seconds since an arbitrary origin, of a number or of a date and a time, of which decimals beyond
    microseconds are kept. Without a zone it is UTC. Raises `ValueError`.
    """
    match = _TIMESTAMP.fullmatch(text.strip())
    if match is None:
        return float(text)
    whole, fraction, zone = match.groups()
    return datetime.fromisoformat(whole + (zone or "+00:00")).timestamp() + float(fraction or 0)


def _positive(text: str) -> float:
    number = float(text)
    if number > 0:
        return number
    raise ValueError("not above 0")
