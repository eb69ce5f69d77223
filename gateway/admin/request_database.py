"""The searchable log of requests, bounded in bytes and in age.

A row is a `RequestSummary` as JSON. The event loop only appends to a list; a thread writes it every half second, so a
SIGKILL loses the requests that ended since.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any, TypeVar

import orjson

from admission.outcome import Outcome
from gateway.admin.logged_texts import Texts
from gateway.admin.request_storage import (
    SEARCH_SECONDS,
    LogPosition,
    NewRow,
    RequestSearch,
    RequestStorage,
    Row,
    SearchTimeout,
    StorageError,
)
from gateway.admin.request_summary import Refusal, RequestSummary, SequenceSummary
from gateway.errors import RequestLogUnavailable
from quotas.damage import tell

log = logging.getLogger(__name__)

WRITE_INTERVAL_SECONDS = 0.5
MAX_PENDING_ROWS = 10_000  # not yet written; further ones are lost and counted
ROWS_PER_WRITE = 1000  # of one transaction
TEXTS_PER_WRITE = 20  # the same with texts, whose JSON would hold the interpreter's lock for long
MAX_PENDING_TEXTS = 500  # behind more rows, texts are left out
EVICTION_INTERVAL_SECONDS = 10.0
MAX_SEARCHES = 2  # at once: each holds one of the few threads in which files of batches, keys and policies are read too
T = TypeVar("T")
NUL = "\\u0000"  # in JSON; no text of Postgres may hold it


class RequestDatabase:
    """Writes ended requests into a storage and searches it. `add` belongs to the event loop; all else is done in
    threads, one write at a time.
    """

    def __init__(
        self, storage: RequestStorage, retention_seconds: float, clock: Callable[[], float] = time.time
    ) -> None:
        """Raises nothing: a storage that cannot be used turns the log off, with a warning."""
        self._storage, self._retention_seconds, self._clock = storage, retention_seconds, clock
        self._pending: list[tuple[RequestSummary, Callable[[], Texts] | None]] = []
        self._writing = threading.Lock()
        self._searching = asyncio.Semaphore(MAX_SEARCHES)
        self._next_eviction = 0.0
        self._failure: str | None = None  # of the latest write; None: it succeeded
        self.num_lost = 0  # requests that could not be kept

    def add(self, summary: RequestSummary, texts: Callable[[], Texts] | None = None) -> None:
        """Keep the summary of an ended request of a tenant, with the texts that a thread makes."""
        if len(self._pending) >= MAX_PENDING_ROWS:
            self.num_lost += 1
            return
        self._pending.append((summary, texts if len(self._pending) < MAX_PENDING_TEXTS else None))

    async def run(self) -> None:
        """Write what has been added, until it is cancelled."""
        while True:
            await asyncio.sleep(WRITE_INTERVAL_SECONDS)
            await asyncio.to_thread(self.write)

    async def close(self) -> None:
        """Write the rest and close the storage."""
        await asyncio.to_thread(self.write)
        with self._writing:
            self._storage.close()

    def write(self) -> None:
        """Write what has been added so far, and evict what is too old or too much. What cannot be written stays for the
        next call.
        """
        with self._writing:
            try:
                while rows := self._pending[:ROWS_PER_WRITE]:
                    if any(texts for _, texts in rows):
                        rows = rows[:TEXTS_PER_WRITE]
                    self._storage.write([_row(*one) for one in rows])
                    del self._pending[: len(rows)]
                if self._clock() >= self._next_eviction:
                    self._next_eviction = self._clock() + EVICTION_INTERVAL_SECONDS
                    self._storage.evict(self._clock() - self._retention_seconds)
            except StorageError as error:
                self._failed(str(error))
            else:
                self._failure = None

    async def search(self, search: RequestSearch) -> tuple[list[RequestSummary], LogPosition | None]:
        """The requests that a search finds, the newest first, and the place from which the next search goes on; None if
        there are no more. Raises `RequestLogUnavailable`.
        """
        async with self._searching:
            return await asyncio.to_thread(self._search, search)

    async def texts(self, name: str) -> Texts | None:
        """The texts of the newest request with this response's id, or else this id; None if there are none. Raises
        `RequestLogUnavailable`.
        """
        async with self._searching:
            rows = await asyncio.to_thread(self._rows, RequestSearch(name=name, has_texts=True))
        read = [self._read(number, summary, _texts_of) for _, number, summary in rows]
        found = [one for one in read if one is not None]
        exact = [one for one in found if one[0] == name] or found
        return exact[0][1] if exact else None

    def _search(self, search: RequestSearch) -> tuple[list[RequestSummary], LogPosition | None]:
        rows = self._rows(search)
        read = [self._read(number, summary, _summary_of) for _, number, summary in rows[: search.limit]]
        found = [summary for summary in read if summary is not None]
        return found, LogPosition(*rows[search.limit - 1][:2]) if len(rows) > search.limit else None

    def _read(self, number: int, text: str, read: Callable[[str], T]) -> T | None:
        """What a row says; None of a damaged one."""
        try:
            return read(text)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            tell(f"row {number} of {self._storage.name}", repr(error))
            return None

    def _rows(self, search: RequestSearch) -> list[Row]:
        self.write()
        try:
            return self._storage.search(search)
        except SearchTimeout:
            problem = f"no answer within {SEARCH_SECONDS:g} s: name a tenant, or a shorter time by since and until"
            raise RequestLogUnavailable(f"The log of requests was not searched: {problem}.") from None
        except StorageError as error:
            problem = f"{self._storage.name} cannot be read ({self._failure or error})"
            raise RequestLogUnavailable(f"The log of requests was not searched: {problem}.") from None

    def _failed(self, problem: str) -> None:
        self._storage.close()  # it is opened anew: the file may have been replaced
        if problem != self._failure:
            name = self._storage.name
            log.warning("%s cannot be written, ended requests are kept in memory meanwhile: %s", name, problem)
        self._failure = problem


def _row(summary: RequestSummary, texts: Callable[[], Texts] | None) -> NewRow:
    entry: Any = summary if texts is None else asdict(summary) | {"texts": texts()}
    try:
        text = orjson.dumps(entry).decode()
    except TypeError:  # a client's text that is not Unicode: lone surrogates
        text = NUL
    names = summary.tenant, summary.request_id, summary.response_id, summary.session
    if NUL in text:
        text = orjson.dumps(_storable(entry if texts else asdict(summary))).decode()
        names = _storable(names)
    tenant, name, response_id, session = names
    return NewRow(summary.unix(summary.ended or summary.began), tenant or "", name, response_id, session, text)


def _storable(value: Any) -> Any:
    match value:
        case str():
            return value.encode(errors="replace").decode().replace("\0", "\ufffd")
        case dict():
            return {name: _storable(inner) for name, inner in value.items()}
        case tuple() | list():
            return [_storable(inner) for inner in value]
    return value


def _texts_of(text: str) -> tuple[str | None, Texts | None]:
    """The id of a row's response, and its texts."""
    found = orjson.loads(text)
    return found["response_id"], found.get("texts")


def _summary_of(text: str) -> RequestSummary:
    """Read a summary; a field that its writer did not know is None."""
    found = orjson.loads(text)
    float(found["ended"]), float(found["began"])  # or the row could not be shown
    summary = RequestSummary(**{field.name: found.get(field.name) for field in fields(RequestSummary)})
    summary.outcome = None if summary.outcome is None else Outcome(summary.outcome)
    summary.refusal = Refusal(**found["refusal"]) if found["refusal"] else None
    summary.sequences = tuple(map(_sequence_of, found["sequences"]))
    return summary


def _sequence_of(found: dict[str, Any]) -> SequenceSummary:
    moments = {name: tuple(found[name]) for name in ("preempted", "resumed")}
    return SequenceSummary(**found | moments)
