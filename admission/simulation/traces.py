"""Recorded traffic, one reader for each format. A reader yields arrivals in the order of the file, the first at 0 s.

`azure`     CSV with TIMESTAMP, ContextTokens, GeneratedTokens: the Azure LLM inference traces (Patel et al., 2024)
`mooncake`  JSON lines with timestamp in ms, input_length, output_length, hash_ids (Qin et al., 2024). Its timestamps
            are coarse: `Workload` spreads requests that share one.
`sluice`    our own event log, whole: a replay of it tells how long every answer became. A request that was refused or
            left before its end is taken to have wanted all it declared.
"""

import csv
import json
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from admission.event_log import Entry, ReplayMismatch, replay
from admission.simulation.arrival import Arrival
from admission.simulation.errors import OptionError, TraceError
from backend.sequence import FinishReason, Sequence

Reader = Callable[[Path], Iterator[Arrival]]

_AZURE_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_trace(path: Path, format_name: str = "auto") -> list[Arrival]:
    """All arrivals, by time. Raises `TraceError` naming the line, `OptionError` when the file cannot be opened."""
    try:
        reader = READERS[_format_of(path) if format_name == "auto" else format_name]
        arrivals = sorted(reader(path))
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError("--trace", str(path), f"cannot be read ({error})") from None
    if not arrivals:
        raise TraceError(path, 1, "there are no requests in this file")
    start = arrivals[0].time
    return [arrival._replace(time=arrival.time - start) for arrival in arrivals]


def azure(path: Path) -> Iterator[Arrival]:
    """Raises `TraceError`."""
    with path.open(newline="", encoding="utf-8") as file:
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
        raise TraceError(path, line, f"TIMESTAMP must be YYYY-MM-DD HH:MM:SS.f, got {row['TIMESTAMP']!r:.40}") from None
    return Arrival(moment, prompt, output, session=line)


def _seconds(timestamp: str) -> float:
    """Since an arbitrary origin; more decimals than microseconds are kept."""
    whole, _, fraction = timestamp.partition(".")
    moment = datetime.fromisoformat(whole.replace(" ", "T") + "+00:00")
    return moment.timestamp() + (float(f"0.{fraction}") if fraction else 0.0)


def mooncake(path: Path) -> Iterator[Arrival]:
    """Raises `TraceError`. A session is the first block of hashes after the one that most requests begin with."""
    with path.open(encoding="utf-8") as file:
        for line, text in enumerate(file, 1):
            if text.strip():
                yield _mooncake_arrival(path, line, text)


def _mooncake_arrival(path: Path, line: int, text: str) -> Arrival:
    try:
        entry: Any = json.loads(text)
    except ValueError as error:
        raise TraceError(path, line, f"not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise TraceError(path, line, "must be an object with timestamp, input_length and output_length")
    milliseconds = _count(path, line, "timestamp", entry.get("timestamp"), at_least=0)
    prompt = _count(path, line, "input_length", entry.get("input_length"), at_least=1)
    output = _count(path, line, "output_length", entry.get("output_length"), at_least=1)
    hashes = entry.get("hash_ids")
    session = hashes[:2][-1] if isinstance(hashes, list) and hashes and isinstance(hashes[-1], int) else line
    return Arrival(milliseconds / 1000, prompt, output, session=session if isinstance(session, int) else line)


def sluice(path: Path) -> Iterator[Arrival]:
    """Raises `TraceError`."""
    sequences: dict[str, Sequence] = {}
    arrived: list[tuple[int, Entry]] = []
    line = 0
    with path.open(encoding="utf-8") as file:
        try:
            for line, entry in enumerate(replay(file, sequences), 1):
                if entry[0] == "arrive":
                    arrived.append((line, entry))
        except ReplayMismatch as mismatch:
            raise TraceError(path, line + 1, f"not reproduced ({mismatch})") from None
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise TraceError(path, line + 1, f"not an entry of an event log that is whole ({error})") from None
    for line, (_, time, name, tenant, prompt, max_tokens, _, priority_class, *_, refusal) in arrived:
        output = _answer_length(sequences.get(name), max_tokens, refusal)
        yield Arrival(time, prompt, output, line, tenant, priority_class, max_tokens)


def _answer_length(sequence: Sequence | None, max_tokens: int, refusal: str | None) -> int:
    ended = sequence is not None and sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    if sequence is None or refusal is not None or not ended:
        return max_tokens
    return max(1, len(sequence.output))


READERS: dict[str, Reader] = {"azure": azure, "mooncake": mooncake, "sluice": sluice}


def _format_of(path: Path) -> str:
    """By its first character: a JSON object, a JSON array, or the header of a table."""
    with path.open(encoding="utf-8") as file:
        return {"{": "mooncake", "[": "sluice"}.get(file.read(1), "azure")


def _count(path: Path, line: int, name: str, value: object, at_least: int) -> int:
    number = int(value) if isinstance(value, str) and value.strip().isdecimal() else value
    if isinstance(number, int) and not isinstance(number, bool) and number >= at_least:
        return number
    raise TraceError(path, line, f"{name} must be an integer of at least {at_least}, got {value!r:.40}")
