"""Where the log of requests is kept: a SQLite file, or a table of a Postgres database (`request_postgres`)."""

import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

FILE = "requests.sqlite"  # in the state directory
VERSION = 1  # of the schemas; SQLite keeps it as its user_version
ROWS_PER_EVICTION = 1000  # of one transaction, the oldest
BUSY_SECONDS = 2.0  # the wait for another gateway's write
SEARCH_SECONDS = 2.0
INSTRUCTIONS_PER_CHECK = 10_000  # of SQLite's machine, between two looks at the clock
CACHE_KIB = 1024  # of SQLite's pages in memory, for each connection


class StorageError(Exception):
    """The log cannot be read or written; the message says why."""


class SearchTimeout(StorageError):
    """A search took more than `SEARCH_SECONDS`."""


class LogPosition(NamedTuple):
    """The place of a row in the log's order, from which a search goes on."""

    ended: float
    number: int


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
    before: LogPosition | None = None  # only what ended earlier than this row
    limit: int = 100
    has_texts: bool = False  # of the requests found; a page of them would be megabytes

    def query(
        self, table: str, text: Callable[..., str], number: Callable[[str], str], without_texts: str
    ) -> tuple[str, list[Any]]:
        """SQL that selects the end, number and summary of each row found, the newest first and one more than `limit`;
        and its parameters. `text` and `number` are the SQL of a field of the summary, by its path.
        """
        lowest, highest = self.statuses or (None, None)
        at, row = self.before or (None, None)
        terms: list[tuple[str, list[Any]]] = [
            ("ended >= ?", [self.since]),
            ("ended < ?", [self.until]),
            ("tenant = ?", [self.tenant]),
            ("session = ?", [self.session]),
            ("(id = ? OR response_id = ?)", [self.name, self.name]),
            ("(ended, number) < (?, ?)", [at, row]),
            (f"{text('key')} = ?", [self.key]),
            (f"{text('model')} = ?", [self.model]),
            (f"{text('service_class')} = ?", [self.service_class]),
            (f"{text('outcome')} = ?", [self.outcome]),
            (f"{text('refusal', 'code')} = ?", [self.code]),
            (f"{number('status')} BETWEEN ? AND ?", [lowest, highest]),
            (f"{number('ended')} - {number('began')} >= ?", [self.min_seconds]),
            (f"{number('first_token')} - {number('began')} >= ?", [self.min_ttft]),
        ]
        given = [(term, values) for term, values in terms if values[0] is not None]
        condition = " AND ".join(term for term, _ in given) or "TRUE"
        shown = "summary" if self.has_texts else without_texts
        query = (
            f"SELECT ended, number, {shown} FROM {table} WHERE {condition} "  # noqa: S608 - of our own terms
            "ORDER BY ended DESC, number DESC LIMIT ?"
        )
        return query, [*(value for _, values in given for value in values), self.limit + 1]


Row = tuple[float, int, str]
"""The end in Unix seconds, the number, and the summary as JSON."""


class NewRow(NamedTuple):
    """A row to write: `summary` is JSON, and of it the columns by which it is found."""

    ended: float  # in Unix seconds
    tenant: str
    id: str
    response_id: str | None
    session: str | None
    summary: str


class RequestStorage(Protocol):
    """Keeps rows within a size and an age. Every method may block, and raises `StorageError`; all but `search` are
    called by one thread at a time.
    """

    name: str  # in messages

    def write(self, rows: Sequence[NewRow]) -> None:
        """Keep these rows: all of them or none."""

    def evict(self, before: float) -> None:
        """Delete rows that ended `before`, in Unix seconds, and the oldest of too many bytes."""

    def search(self, search: RequestSearch) -> list[Row]:
        """Rows that the search finds, the newest first, one more than its limit if there are more."""

    def close(self) -> None:
        """Let go of the connection; the next write opens another."""


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
_COLUMNS = "ended, tenant, id, response_id, session, summary"


class SqliteStorage:
    """A SQLite file. Several gateways may share it: with a write-ahead log each of them writes and reads."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.name = str(path)
        self._path, self._max_bytes = path, max_bytes
        self._connection: sqlite3.Connection | None = None

    def write(self, rows: Sequence[NewRow]) -> None:
        """One statement for all, which SQLite runs without the interpreter's lock."""
        places = ",".join(["(?,?,?,?,?,?)"] * len(rows))
        with _translated():
            self._opened().execute(
                f"INSERT INTO requests ({_COLUMNS}) VALUES {places}",  # noqa: S608 - of our own terms
                [value for row in rows for value in row],
            )

    def evict(self, before: float) -> None:
        with _translated():
            connection = self._opened()
            while _delete_oldest(connection, before) == ROWS_PER_EVICTION:
                pass
            while _used_bytes(connection) > self._max_bytes and _delete_oldest(connection):
                pass
            connection.executescript("PRAGMA incremental_vacuum")  # `execute` would free a single page

    def search(self, search: RequestSearch) -> list[Row]:
        query, values = search.query("requests", _field, _field, _sound("json_remove(summary, '$.texts')"))
        with self._reading() as connection:
            return connection.execute(query, values).fetchall()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _opened(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = _open(self._path)
        return self._connection

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """A connection that may only read, and for `SEARCH_SECONDS` at most."""
        until = time.monotonic() + SEARCH_SECONDS
        with _translated(until):
            connection = sqlite3.connect(f"{self._path.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_SECONDS)
            try:
                connection.set_progress_handler(lambda: time.monotonic() > until, INSTRUCTIONS_PER_CHECK)
                yield connection
            finally:
                connection.close()


@contextmanager
def _translated(until: float = float("inf")) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise (SearchTimeout if time.monotonic() > until else StorageError)(str(error)) from None


def _field(*path: str) -> str:
    return _sound(f"json_extract(summary, '$.{'.'.join(path)}')")


def _sound(term: str) -> str:
    """A term of the summary that is '' where this is damaged: one row would fail the search."""
    return f"CASE WHEN json_valid(summary) THEN {term} ELSE '' END"


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
