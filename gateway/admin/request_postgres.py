"""The log of requests as a table of a Postgres database, which any number of gateways may share.

`sluice.requests` has a row for each request, as the SQLite file has; `sluice.request_log` has one row, with the version
of the schema and the bytes of all requests.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import psycopg
from psycopg.types.string import TextLoader

from gateway.admin.request_storage import (
    ROWS_PER_EVICTION,
    SEARCH_SECONDS,
    VERSION,
    NewRow,
    RequestSearch,
    Row,
    SearchTimeout,
    StorageError,
)

CONNECT_SECONDS = 5
WRITE_SECONDS = 10
ROW_BYTES = 600  # of a row beside its summary: copies of its ids, and its entries in indexes
COUNT_INTERVAL_SECONDS = 3600.0  # a count goes through the table, and nobody writes meanwhile
LOCK = 7_585_123  # of transactions that make the tables

_SCHEMA = f"""
CREATE SCHEMA IF NOT EXISTS sluice;
CREATE TABLE sluice.requests (
    number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    ended DOUBLE PRECISION NOT NULL,  -- in Unix seconds
    tenant TEXT NOT NULL,
    id TEXT NOT NULL,
    response_id TEXT,
    session TEXT,
    bytes INTEGER NOT NULL,
    summary JSONB NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.02);
CREATE INDEX ON sluice.requests (ended, number);
CREATE INDEX ON sluice.requests (tenant, ended);
CREATE INDEX ON sluice.requests (id);
CREATE INDEX ON sluice.requests (response_id);
CREATE INDEX ON sluice.requests (session, ended) WHERE session IS NOT NULL;
CREATE TABLE sluice.request_log (version INTEGER NOT NULL, bytes BIGINT NOT NULL);
INSERT INTO sluice.request_log VALUES ({VERSION}, 0);
"""  # noqa: S608 - of our own terms
_INSERT = f"""
WITH added AS (
    INSERT INTO sluice.requests (ended, tenant, id, response_id, session, bytes, summary)
    SELECT
        (value ->> 'began_unix')::float8 + (value ->> 'ended')::float8 - (value ->> 'began')::float8,
        value ->> 'tenant',
        value ->> 'request_id',
        value ->> 'response_id',
        value ->> 'session',
        octet_length(value::text) + {ROW_BYTES},
        value
    FROM jsonb_array_elements(%s::jsonb) AS value
    RETURNING bytes
)
UPDATE sluice.request_log SET bytes = bytes + (SELECT sum(bytes) FROM added)
"""  # noqa: S608 - of our own terms
_DELETE = """
WITH gone AS (
    DELETE FROM sluice.requests WHERE number IN (
        SELECT number FROM sluice.requests WHERE ended < %s ORDER BY ended LIMIT %s FOR UPDATE SKIP LOCKED
    )
    RETURNING bytes
)
UPDATE sluice.request_log SET bytes = bytes - coalesce((SELECT sum(bytes) FROM gone), 0)
RETURNING bytes, (SELECT count(*) FROM gone)
"""

_COUNT = """
UPDATE sluice.request_log SET bytes = (SELECT coalesce(sum(bytes), 0) FROM sluice.requests) RETURNING bytes
"""


class PostgresStorage:
    """The tables of a database, made by the first gateway that may make them."""

    def __init__(self, url: str, max_bytes: int) -> None:
        parts = urlsplit(url)  # its password is not shown
        self.name = f"the database {parts.path[1:]} at {parts.hostname or 'its socket'}"
        self._url, self._max_bytes = url, max_bytes
        self._connection: psycopg.Connection | None = None
        self._counted = -COUNT_INTERVAL_SECONDS  # moment of the last count, on the monotonic clock

    def write(self, rows: Sequence[NewRow]) -> None:
        with self._transaction() as transaction:
            transaction.execute(_INSERT, [f"[{','.join(row.summary for row in rows)}]"])

    def evict(self, before: float) -> None:
        used, deleted = self._delete_oldest(before)
        while deleted == ROWS_PER_EVICTION:
            used, deleted = self._delete_oldest(before)
        if used > self._max_bytes and time.monotonic() - self._counted >= COUNT_INTERVAL_SECONDS:
            self._counted = time.monotonic()  # an operator may have deleted rows
            with suppress(SearchTimeout):  # else as many bytes as were told
                used = self._count()
        deleted = ROWS_PER_EVICTION
        while used > self._max_bytes and deleted:
            used, deleted = self._delete_oldest(float("inf"))

    def search(self, search: RequestSearch) -> list[Row]:
        query, values = search.query("sluice.requests", _text, _number, "summary - 'texts'")
        with _translated(), self._connect() as connection, connection.transaction():
            connection.adapters.register_loader("jsonb", TextLoader)
            connection.execute(f"SET LOCAL statement_timeout = {round(1000 * SEARCH_SECONDS)}")
            rows: list[Row] = connection.execute(query.replace("?", "%s").encode(), values).fetchall()
        return rows

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _delete_oldest(self, before: float) -> tuple[int, int]:
        """Delete the oldest rows that ended `before`; returns the bytes that are left, and the number deleted."""
        with self._transaction() as transaction:
            found: tuple[int, int] | None = transaction.execute(_DELETE, [before, ROWS_PER_EVICTION]).fetchone()
        assert found is not None
        return found

    def _count(self) -> int:
        """Go through the table to correct the bytes of all requests, and return them."""
        with self._transaction() as transaction:
            transaction.execute("SELECT FROM sluice.request_log FOR UPDATE")  # nobody writes meanwhile
            found: tuple[int] | None = transaction.execute(_COUNT).fetchone()
        assert found is not None
        return found[0]

    @contextmanager
    def _transaction(self) -> Iterator[psycopg.Connection]:
        with _translated():
            if self._connection is None:
                self._connection = self._opened()
            with self._connection.transaction():
                self._connection.execute(f"SET LOCAL statement_timeout = {1000 * WRITE_SECONDS}")
                yield self._connection

    def _opened(self) -> psycopg.Connection:
        """Connect, and make the tables unless they are there. Raises `psycopg.Error` and `StorageError`."""
        connection = self._connect()
        try:
            with connection.transaction():
                connection.execute("SELECT pg_advisory_xact_lock(%s)", [LOCK])
                if connection.execute("SELECT to_regclass('sluice.request_log')").fetchone() == (None,):
                    connection.execute(_SCHEMA)
                (version,) = connection.execute("SELECT version FROM sluice.request_log").fetchone()
                if version != VERSION:
                    raise StorageError(f"its tables are of version {version}, of a newer Sluice; this knows {VERSION}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _connect(self) -> psycopg.Connection:
        return psycopg.connect(
            self._url,
            autocommit=True,
            prepare_threshold=None,  # a pooler may give each transaction another connection
            connect_timeout=CONNECT_SECONDS,
            tcp_user_timeout=1000 * WRITE_SECONDS,
            keepalives_idle=WRITE_SECONDS,
            application_name="sluice",
        )


def _text(*path: str) -> str:
    return f"summary #>> '{{{','.join(path)}}}'"


def _number(name: str) -> str:
    return f"({_text(name)})::float8"


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except psycopg.errors.QueryCanceled as error:
        raise SearchTimeout(str(error)) from None
    except psycopg.Error as error:
        raise StorageError(" ".join(str(error).split())) from None
