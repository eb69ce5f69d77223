"""Reads recorded traffic, with one reader for each format. A reader yields arrivals in the order of the file, the first
at 0 s.

`azure`     CSV with TIMESTAMP, ContextTokens, GeneratedTokens: the Azure LLM inference traces of 2023 (Patel et al.,
            2024) and of 2024 (Stojkovic et al., 2025), whose timestamps have a zone
`mooncake`  JSON lines with timestamp in ms, input_length, output_length, hash_ids (Qin et al., 2024). Its timestamps
            are coarse: `Workload` spreads requests that share one. A hash id stands for 512 tokens and all before
            them: by it prompts share what they begin with.
`sluice`    our own event log, whole: see `recording`

Each may be compressed with gzip.
"""

import csv
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from admission.simulation.arrival import Arrival
from admission.simulation.contents import Content
from admission.simulation.device import Device
from admission.simulation.errors import OptionError, TraceError
from admission.simulation.recording import NO_FACTS, TraceFacts, read_recording

_GZIP = b"\x1f\x8b"  # RFC 1952, 2.3.1

UNREADABLE = (OSError, EOFError, zlib.error, UnicodeDecodeError)
"""The errors of reading such a file when it is not there, cut off, damaged or no text."""


def open_text(path: Path, newline: str | None = None, errors: str = "strict") -> TextIO:
    """Opens a file of UTF-8, with or without a byte order mark; compression shows in the first bytes, not in
    the name.
    """
    with path.open("rb") as file:
        is_compressed = file.read(len(_GZIP)) == _GZIP
    if is_compressed:
        return gzip.open(path, "rt", encoding="utf-8-sig", errors=errors, newline=newline)
    return path.open(encoding="utf-8-sig", errors=errors, newline=newline)


LogLines = Callable[[Path], Iterable[str]]  # of an event log, from its first segment on
Reader = Callable[[Path], Iterator[Arrival]]

_AZURE_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)?")
_NUMBER = re.compile(r"\s*\d{1,15}\s*")
_MOST = 10**15 - 1  # tokens or milliseconds
MOONCAKE_UNIT = 512  # tokens that a hash id stands for


class Traffic(NamedTuple):
    """Arrivals in order of time, the device that they were recorded on, where the trace says, and its other facts."""

    arrivals: list[Arrival]
    device: Device | None = None
    facts: TraceFacts = NO_FACTS


def _lines(path: Path) -> Iterator[str]:
    with open_text(path) as file:
        yield from file


def read_trace(path: Path) -> list[Arrival]:
    """Returns all arrivals in order of time. Raises as `read_traffic` does."""
    return read_traffic(path).arrivals


def read_traffic(path: Path, format_name: str = "auto", log_lines: LogLines = _lines) -> Traffic:
    """Reads a trace. Raises `TraceError` naming the line, `OptionError` when the file cannot be opened."""
    try:
        kind = _format_of(path) if format_name == "auto" else format_name
        read = (
            Traffic(*read_recording(path, log_lines(path))) if kind == "sluice" else Traffic(list(READERS[kind](path)))
        )
    except UNREADABLE as error:
        raise OptionError("--trace", str(path), f"cannot be read ({error})") from None
    if not read.arrivals:
        raise TraceError(path, 1, "there are no requests in this file")
    arrivals = sorted(read.arrivals, key=itemgetter(slice(4)))
    start = arrivals[0].time
    facts = read.facts if kind == "sluice" else NO_FACTS._replace(began=start if kind == "azure" else None)
    has_contents = any(arrival.content for arrival in arrivals)
    facts = facts._replace(has_contents=has_contents, is_recorded=kind == "sluice")
    return Traffic([arrival._replace(time=arrival.time - start) for arrival in arrivals], read.device, facts)


def azure(path: Path) -> Iterator[Arrival]:
    """Reads the CSV of the Azure traces. Raises `TraceError`."""
    with open_text(path, newline="") as file:
        rows = csv.DictReader(file, strict=True)
        missing = [name for name in _AZURE_FIELDS if name not in (rows.fieldnames or ())]
        if missing:
            raise TraceError(path, 1, f"the header lacks {', '.join(missing)}")
        try:
            for row in rows:
                yield _azure_arrival(path, rows.line_num, row)
        except csv.Error as error:
            raise TraceError(path, rows.line_num, f"not CSV: {error}") from None


def _azure_arrival(path: Path, line: int, row: dict[str, str]) -> Arrival:
    prompt = _count(path, line, "ContextTokens", row["ContextTokens"], at_least=1)
    output = _count(path, line, "GeneratedTokens", row["GeneratedTokens"], at_least=1)
    try:
        moment = _seconds(row["TIMESTAMP"])
    except (TypeError, ValueError):
        form = "YYYY-MM-DD HH:MM:SS.f, with a zone such as +00:00 or none"
        raise TraceError(path, line, f"TIMESTAMP must be {form}, got {row['TIMESTAMP']!r:.40}") from None
    return Arrival(moment, prompt, output, session=line)


def _seconds(timestamp: str) -> float:
    """Returns seconds since an arbitrary origin; decimals beyond microseconds are kept. Without a zone it is UTC."""
    match = _TIMESTAMP.fullmatch(timestamp.strip())
    if match is None:
        raise ValueError("not a timestamp")
    whole, fraction, zone = match.groups()
    return datetime.fromisoformat(whole + (zone or "+00:00")).timestamp() + float(fraction or 0)


def mooncake(path: Path) -> Iterator[Arrival]:
    """Reads the JSON lines of Mooncake's traces. A session is the second block of hashes, as most requests share the
    first. Raises `TraceError`.
    """
    with open_text(path) as file:
        for line, text in enumerate(file, 1):
            if text.strip():
                yield _mooncake_arrival(path, line, text)


def _mooncake_arrival(path: Path, line: int, text: str) -> Arrival:
    try:
        entry: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(path, line, f"not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise TraceError(path, line, "must be an object with timestamp, input_length and output_length")
    milliseconds = _count(path, line, "timestamp", entry.get("timestamp"), at_least=0)
    prompt = _count(path, line, "input_length", entry.get("input_length"), at_least=1)
    output = _count(path, line, "output_length", entry.get("output_length"), at_least=1)
    hashes = entry.get("hash_ids")
    session = hashes[:2][-1] if isinstance(hashes, list) and hashes and isinstance(hashes[-1], int) else line
    content = Content(tuple(hashes), MOONCAKE_UNIT, prompt) if isinstance(hashes, list) and _are_ids(hashes) else None
    session = session if isinstance(session, int) else line
    return Arrival(milliseconds / 1000, prompt, output, session=session, content=content)


def _are_ids(hashes: list[Any]) -> bool:
    return all(type(one) is int for one in hashes)


READERS: dict[str, Reader] = {"azure": azure, "mooncake": mooncake}
FORMATS = (*READERS, "sluice")


def _format_of(path: Path) -> str:
    """Returns the format by the first character: of a JSON object, a JSON array, or the header of a table."""
    with open_text(path) as file:
        return {"{": "mooncake", "[": "sluice"}.get(file.read(1), "azure")


def _count(path: Path, line: int, name: str, value: object, at_least: int) -> int:
    number = int(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value
    if isinstance(number, int) and not isinstance(number, bool) and at_least <= number <= _MOST:
        return number
    reason = f"must be an integer of at least {at_least} and at most 15 digits"
    raise TraceError(path, line, f"{name} {reason}, got {value!r:.40}")
