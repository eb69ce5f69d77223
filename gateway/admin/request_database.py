"""The searchable log of requests: a SQLite file in the state directory, bounded in bytes and in age.

A row is a `RequestSummary` as JSON, beside the columns with an index. The event loop only appends to a list; a thread
writes it every half second, so a SIGKILL loses the requests that ended since. Several gateways may share a state
directory: with SQLite's write-ahead log each of them writes and reads.
"""

import asyncio
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from admission.outcome import Outcome
from gateway.admin.request_summary import Refusal, RequestSummary, SequenceSummary
from gateway.errors import RequestLogUnavailable

log = logging.getLogger(__name__)

FILE = "requests.sqlite"  # in the state directory
VERSION = 1  # of the schema, kept as SQLite's user_version
WRITE_INTERVAL_SECONDS = 0.5
MAX_PENDING_ROWS = 10_000  # not yet written; further ones are lost and counted
ROWS_PER_WRITE = 1000  # of one transaction
ROWS_PER_EVICTION = 1000  # of one transaction, the oldest
EVICTION_INTERVAL_SECONDS = 10.0
BUSY_SECONDS = 2.0  # the wait for another gateway's write
SEARCH_SECONDS = 2.0
MAX_SEARCHES = 2  # at once: each holds one of the few threads in which files of batches, keys and policies are read too
INSTRUCTIONS_PER_CHECK = 10_000  # of SQLite's machine, between two looks at the clock
CACHE_KIB = 1024  # of SQLite's pages in memory, for each connection

_SCHEMA = f"""
PRAGMA auto_vacuum = INCREMENTAL;
PRAGMA journal_mode = WAL;
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS requests (
    number INTEGER PRIMARY KEY,
    ended REAL NOT NULL,  -- in Unix seconds
    tenant TEXT NOT NULL,
    id TEXT NOT NULL,
    response_id TEXT,
    session TEXT,
    summary TEXT NOT NULL  -- JSON
);
CREATE INDEX IF NOT EXISTS by_end ON requests (ended);
CREATE INDEX IF NOT EXISTS by_tenant ON requests (tenant, ended);
CREATE INDEX IF NOT EXISTS by_id ON requests (id);
CREATE INDEX IF NOT EXISTS by_response_id ON requests (response_id);
CREATE INDEX IF NOT EXISTS by_session ON requests (session, ended) WHERE session IS NOT NULL;
PRAGMA user_version = {VERSION};
COMMIT;
"""
_INSERT = """
INSERT INTO requests (ended, tenant, id, response_id, session, summary)
SELECT
    json_extract(value, '$.began_unix') + json_extract(value, '$.ended') - json_extract(value, '$.began'),
    json_extract(value, '$.tenant'),
    json_extract(value, '$.request_id'),
    json_extract(value, '$.response_id'),
    json_extract(value, '$.session'),
    value
FROM json_each(?)
"""  # one statement for many rows: SQLite reads them without the interpreter's lock


@dataclass(frozen=True, slots=True)
class RequestSearch:
    """The filters of a search, all of which a found request meets; None: any. Moments are in Unix seconds."""

    since: float | None = None
    until: float | None = None
    tenant: str | None = None
    key: str | None = None
    model: str | None = None
    service_class: str | None = None
    session: str | None = None
    name: str | None = None  # a request's id or its response's
    outcome: str | None = None
    code: str | None = None
    statuses: tuple[int, int] | None = None  # the lowest and the highest
    min_seconds: float | None = None
    min_ttft: float | None = None
    before: "LogPosition | None" = None  # only what ended earlier than this row
    limit: int = 100

    def condition(self) -> tuple[str, list[Any]]:
        """Return SQL's condition and its parameters."""
        lowest, highest = self.statuses or (None, None)
        at, number = self.before or (None, None)
        terms: list[tuple[str, list[Any]]] = [
            ("ended >= ?", [self.since]),
            ("ended < ?", [self.until]),
            ("tenant = ?", [self.tenant]),
            ("session = ?", [self.session]),
            ("(id = ? OR response_id = ?)", [self.name, self.name]),
            ("(ended, number) < (?, ?)", [at, number]),
            ("json_extract(summary, '$.key') = ?", [self.key]),
            ("json_extract(summary, '$.model') = ?", [self.model]),
            ("json_extract(summary, '$.service_class') = ?", [self.service_class]),
            ("json_extract(summary, '$.outcome') = ?", [self.outcome]),
            ("json_extract(summary, '$.refusal.code') = ?", [self.code]),
            ("json_extract(summary, '$.status') BETWEEN ? AND ?", [lowest, highest]),
            ("json_extract(summary, '$.ended') - json_extract(summary, '$.began') >= ?", [self.min_seconds]),
            ("json_extract(summary, '$.first_token') - json_extract(summary, '$.began') >= ?", [self.min_ttft]),
        ]
        given = [(term, values) for term, values in terms if values[0] is not None]
        condition = " AND ".join(term for term, _ in given) or "TRUE"
        return condition, [value for _, values in given for value in values]


class LogPosition(NamedTuple):
    """The place of a row in the log's order, from which a search goes on."""

    ended: float
    number: int


class RequestDatabase:
    """Writes ended requests into the file and searches it. `add` belongs to the event loop; all else is done in
    threads, one write at a time.
    """

    def __init__(
        self, path: Path, max_bytes: int, retention_seconds: float, clock: Callable[[], float] = time.time
    ) -> None:
        """Raises nothing: a file that cannot be used turns the log off, with a warning."""
        self._path, self._max_bytes, self._retention_seconds, self._clock = path, max_bytes, retention_seconds, clock
        self._pending: list[RequestSummary] = []
        self._writing = threading.Lock()
        self._searching = asyncio.Semaphore(MAX_SEARCHES)
        self._connection: sqlite3.Connection | None = None
        self._next_eviction = 0.0
        self._failure: str | None = None  # of the latest write; None: it succeeded
        self.num_lost = 0  # requests that could not be kept

    def add(self, summary: RequestSummary) -> None:
        """Keep the summary of an ended request of a tenant."""
        if len(self._pending) < MAX_PENDING_ROWS:
            self._pending.append(summary)
        else:
            self.num_lost += 1

    async def run(self) -> None:
        """Write what has been added, until it is cancelled."""
        while True:
            await asyncio.sleep(WRITE_INTERVAL_SECONDS)
            await asyncio.to_thread(self.write)

    async def close(self) -> None:
        """Write the rest and close the file."""
        await asyncio.to_thread(self.write)
        with self._writing:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def write(self) -> None:
        """Write what has been added so far, and evict what is too old or too much. What cannot be written stays for the
        next call.
        """
        with self._writing:
            try:
                while rows := self._pending[:ROWS_PER_WRITE]:
                    self._opened().execute(_INSERT, (_json(rows),))
                    del self._pending[: len(rows)]
                if self._clock() >= self._next_eviction:
                    self._next_eviction = self._clock() + EVICTION_INTERVAL_SECONDS
                    self._evict(self._opened())
            except (sqlite3.Error, OSError) as error:
                self._failed(str(error))
            else:
                self._failure = None

    async def search(self, search: RequestSearch) -> tuple[list[RequestSummary], LogPosition | None]:
        """The requests that a search finds, the newest first, and the place from which the next search goes on; None if
        there are no more. Raises `RequestLogUnavailable`.
        """
        async with self._searching:
            return await asyncio.to_thread(self._search, search)

    def _search(self, search: RequestSearch) -> tuple[list[RequestSummary], LogPosition | None]:
        self.write()
        condition, values = search.condition()
        query = (
            f"SELECT ended, number, summary FROM requests WHERE {condition} "  # noqa: S608 - of our own terms
            "ORDER BY ended DESC, number DESC LIMIT ?"
        )
        with self._reading() as connection:
            rows = connection.execute(query, [*values, search.limit + 1]).fetchall()
        found = [_summary_of(summary) for _, _, summary in rows[: search.limit]]
        return found, LogPosition(*rows[search.limit - 1][:2]) if len(rows) > search.limit else None

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """A connection that may only read, and for `SEARCH_SECONDS` at most."""
        until = time.monotonic() + SEARCH_SECONDS
        try:
            connection = sqlite3.connect(f"{self._path.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_SECONDS)
            try:
                connection.set_progress_handler(lambda: time.monotonic() > until, INSTRUCTIONS_PER_CHECK)
                yield connection
            finally:
                connection.close()
        except sqlite3.Error as error:
            if time.monotonic() > until:
                problem = f"no answer within {SEARCH_SECONDS:g} s: name a tenant, or a shorter time by since and until"
            else:
                problem = f"{self._path} cannot be read ({self._failure or error})"
            raise RequestLogUnavailable(f"The log of requests was not searched: {problem}.") from None

    def _opened(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = _open(self._path)
        return self._connection

    def _evict(self, connection: sqlite3.Connection) -> None:
        oldest = self._clock() - self._retention_seconds
        while _delete_oldest(connection, oldest) == ROWS_PER_EVICTION:
            pass
        while _used_bytes(connection) > self._max_bytes and _delete_oldest(connection):
            pass
        connection.executescript("PRAGMA incremental_vacuum")  # `execute` would free a single page

    def _failed(self, problem: str) -> None:
        if self._connection is not None:  # it is opened anew: the file may have been replaced
            self._connection.close()
            self._connection = None
        if problem != self._failure:
            log.warning("%s cannot be written, ended requests are kept in memory meanwhile: %s", self._path, problem)
        self._failure = problem


def _open(path: Path) -> sqlite3.Connection:
    """Open the file, or make it. Raises `sqlite3.Error` and `OSError`."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite's own would be readable to all
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            raise sqlite3.DatabaseError(f"its version is {version}, of a newer Sluice; this one knows {VERSION}")
        if version < VERSION:
            connection.executescript(_SCHEMA)
        connection.execute("PRAGMA synchronous = NORMAL")  # what is committed outlives the process
        connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
    except BaseException:
        connection.close()
        raise
    return connection


def _delete_oldest(connection: sqlite3.Connection, before: float | None = None) -> int:
    """Delete the oldest rows, `ROWS_PER_EVICTION` at most, if they ended `before`; returns their number."""
    condition, values = ("TRUE", []) if before is None else ("ended < ?", [before])
    oldest = f"SELECT number FROM requests WHERE {condition} ORDER BY ended LIMIT {ROWS_PER_EVICTION}"  # noqa: S608
    return connection.execute(f"DELETE FROM requests WHERE number IN ({oldest})", values).rowcount  # noqa: S608


def _used_bytes(connection: sqlite3.Connection) -> int:
    pages, free, size = (
        connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)


def _json(summaries: list[RequestSummary]) -> str:
    try:
        return orjson.dumps(summaries).decode()
    except TypeError:  # a client's text that is not Unicode: lone surrogates
        return orjson.dumps([_encodable(asdict(summary)) for summary in summaries]).decode()


def _encodable(value: Any) -> Any:
    match value:
        case str():
            return value.encode(errors="replace").decode()
        case dict():
            return {name: _encodable(inner) for name, inner in value.items()}
        case tuple():
            return [_encodable(inner) for inner in value]
    return value


def _summary_of(text: str) -> RequestSummary:
    """Read a summary; a field that its writer did not know is None."""
    found = orjson.loads(text)
    summary = RequestSummary(**{field.name: found.get(field.name) for field in fields(RequestSummary)})
    summary.outcome = None if summary.outcome is None else Outcome(summary.outcome)
    summary.refusal = Refusal(**found["refusal"]) if found["refusal"] else None
    summary.sequences = tuple(map(_sequence_of, found["sequences"]))
    return summary


def _sequence_of(found: dict[str, Any]) -> SequenceSummary:
    moments = {name: tuple(found[name]) for name in ("preempted", "resumed")}
    return SequenceSummary(**found | moments)
