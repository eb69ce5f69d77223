"""Reads recorded traffic: tables, Mooncake's JSON lines and our own event logs.

`csv`       a table, and those of `azure`, `vidur` and `servegen`: see `tables`
`mooncake`  JSON lines with timestamp in ms, input_length, output_length, hash_ids (Qin et al., 2024). Its timestamps
            are coarse: `Workload` spreads requests that share one. A hash id stands for 512 tokens and all before
            them: by it prompts share what they begin with.
`sluice`    our own event log, whole: see `recording`

Each may be compressed with gzip.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from gateway.telemetry.event_log_file import UNREADABLE, open_text
from labs.simulation.arrival import Arrival
from labs.simulation.contents import Content
from labs.simulation.device import Device
from labs.simulation.errors import OptionError, TraceError
from labs.simulation.recording import NO_FACTS, TraceFacts, read_recording
from labs.simulation.tables import LAYOUTS, NO_COLUMNS, Columns, Table, count_of

LogLines = Callable[[Path], Iterable[str]]  # lines of an event log, from its first segment on

_MIN_UNIX_SECONDS = 1e9  # seconds; a larger time counts from 1970
MOONCAKE_UNIT_TOKENS = 512  # tokens of a hash id


class Traffic(NamedTuple):
    """Arrivals in order of time, the recorded device, if known, and other facts of the trace."""

    arrivals: list[Arrival]
    device: Device | None = None
    facts: TraceFacts = NO_FACTS


def _lines(path: Path) -> Iterator[str]:
    with open_text(path) as file:
        yield from file


def read_trace(path: Path) -> list[Arrival]:
    """Returns all arrivals in order of time. Raises as `read_traffic` does."""
    return read_traffic(path).arrivals


def read_traffic(
    path: Path,
    format_name: str = "auto",
    log_lines: LogLines = _lines,
    columns: Columns = NO_COLUMNS,
    option: str = "--trace",
) -> Traffic:
    """Reads a trace. Raises `TraceError` naming the line, `OptionError` of the `option` that named the file when it
    cannot be opened, or when it is no table and `columns` of one are given.
    """
    try:
        kind = _format_of(path) if format_name == "auto" else format_name
        if columns and kind in ("mooncake", "sluice"):
            raise OptionError("--columns", dict(columns), f"{path} is no table: its format is {kind}")
        read = _read(path, kind, log_lines, columns)
    except UNREADABLE as error:
        reason = getattr(error, "strerror", None) or error
        if isinstance(error, UnicodeDecodeError):
            reason = "it is no UTF-8 text"
        raise OptionError(option, str(path), f"cannot be read: {reason}") from None
    if not read.arrivals:
        raise TraceError(path, 1, "there are no requests in this file")
    arrivals = sorted(read.arrivals, key=itemgetter(slice(4)))
    start = arrivals[0].time
    has_contents = any(arrival.content for arrival in arrivals)
    facts = read.facts._replace(has_contents=has_contents, is_recorded=kind == "sluice")
    return Traffic([arrival._replace(time=arrival.time - start) for arrival in arrivals], read.device, facts)


def _read(path: Path, kind: str, log_lines: LogLines, columns: Columns) -> Traffic:
    if kind == "sluice":
        return Traffic(*read_recording(path, log_lines(path)))
    if kind == "mooncake":
        return Traffic(list(mooncake(path)))
    with open_text(path, newline="") as file:
        table = Table.open(path, file, None if kind == "csv" else kind, columns)
        arrivals = list(table.arrivals())
    first = min((arrival.time for arrival in arrivals), default=0.0)
    began = first if first >= _MIN_UNIX_SECONDS else None
    facts = TraceFacts(
        "service_tier" in table.columns, began=began, columns=tuple(table.columns.items()), unread=table.unread
    )
    return Traffic(arrivals, None, facts)


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
    milliseconds = count_of(path, line, "timestamp", entry.get("timestamp"), at_least=0)
    prompt = count_of(path, line, "input_length", entry.get("input_length"), at_least=1)
    output = count_of(path, line, "output_length", entry.get("output_length"), at_least=1)
    hashes = entry.get("hash_ids")
    session = hashes[:2][-1] if isinstance(hashes, list) and hashes and isinstance(hashes[-1], int) else line
    content = (
        Content(tuple(hashes), MOONCAKE_UNIT_TOKENS, prompt) if isinstance(hashes, list) and _are_ids(hashes) else None
    )
    session = session if isinstance(session, int) else line
    return Arrival(milliseconds / 1000, prompt, output, session=session, content=content)


def _are_ids(hashes: list[Any]) -> bool:
    return all(type(one) is int for one in hashes)


FORMATS = ("csv", *LAYOUTS, "mooncake", "sluice")


def _format_of(path: Path) -> str:
    """Returns the format by the first character: of a JSON object, a JSON array, or the header of a table."""
    with open_text(path) as file:
        return {"{": "mooncake", "[": "sluice"}.get(file.read(1), "csv")
