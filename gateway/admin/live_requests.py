"""Live requests and recently ended ones, as the admin page lists them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import nsmallest
from itertools import islice, zip_longest
from typing import Any, Protocol, TypeVar

from gateway.admin.history import MAX_ENDED_REQUESTS, History
from gateway.admin.request_summary import RequestSummary, SequenceSummary
from gateway.admin.rows import MAX_ROWS, Reasons, Row, ended_row, live_row
from gateway.background import map_in_slices
from gateway.errors import BadRequest, RequestNotFound
from gateway.quoting import quoted
from gateway.telemetry.request_record import RequestRecord, Telemetry
from quotas.policy.units import counted


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """One phase of a request. `at` and `until` are in seconds since the request began; `until` is None for a moment,
    and for an open phase.
    """

    at: float
    until: float | None
    what: str
    detail: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"at": self.at, "until": self.until, "what": self.what, "detail": self.detail}


def phases(summary: RequestSummary) -> list[TimelineSpan]:
    """The phases of a request by their beginnings."""
    spans = [*_before(summary), *_engine(summary), *_after(summary)]
    return sorted(spans, key=lambda span: (span.at, _ORDER.index(span.what)))


def detailed(row: Row, summary: RequestSummary) -> Row:
    """A row with the request's timeline."""
    return row | {"began": summary.began_unix, "timeline": [span.to_json() for span in phases(summary)]}


_ORDER = (
    "auth",
    "body",
    "reserve",
    "queue",
    "prefill",
    "preempted",
    "resumed",
    "first token",
    "decode",
    "settle",
    "end",
)


def _before(summary: RequestSummary) -> Iterator[TimelineSpan]:
    """Yield the phases before the engine's."""
    if summary.authenticated is not None:
        yield _span(summary, summary.began, summary.authenticated, "auth", summary.tenant or "")
        yield _span(summary, summary.authenticated, summary.body_read, "body")
    if summary.reserving is not None:
        yield _span(summary, summary.reserving, summary.reserved, "reserve")


def _engine(summary: RequestSummary) -> Iterator[TimelineSpan]:
    for number, seq in enumerate(summary.sequences, 1):
        label = f"sequence {number} of {summary.num_sequences}" if summary.num_sequences > 1 else ""
        yield from _sequence(summary, seq, label)


def _sequence(summary: RequestSummary, seq: SequenceSummary, label: str) -> Iterator[TimelineSpan]:
    tokens, chunks = seq.num_prompt_tokens, seq.num_chunks
    yield _span(summary, seq.queued, seq.admitted or seq.ended, "queue", label)
    if seq.admitted is not None:
        detail = _joined(f"{counted(tokens, 'prompt token')} in {counted(chunks, 'chunk')}", label)
        yield _span(summary, seq.admitted, seq.first_token or seq.prefilled or seq.ended, "prefill", detail)
    if seq.first_token is not None:
        yield _moment(summary, seq.first_token, "first token", label)
        detail = _joined(counted(seq.num_output_tokens, "token"), label)
        yield _span(summary, seq.first_token, seq.ended, "decode", detail)
    for preempted, resumed in zip_longest(seq.preempted, seq.resumed):
        if preempted is not None:
            yield _span(summary, preempted, resumed, "preempted", label)
        if resumed is not None:
            yield _moment(summary, resumed, "resumed", label)


def _after(summary: RequestSummary) -> Iterator[TimelineSpan]:
    if summary.settling is not None:
        yield _span(summary, summary.settling, summary.ended, "settle")
    if summary.ended is not None:
        message = summary.refusal.message if summary.refusal else ""
        yield _moment(summary, summary.ended, "end", _joined(str(summary.outcome or ""), message))


def _joined(*parts: str) -> str:
    return ": ".join(part for part in parts if part)


def _span(summary: RequestSummary, at: float, until: float | None, what: str, detail: str = "") -> TimelineSpan:
    until = summary.ended if until is None else until
    return TimelineSpan(at - summary.began, None if until is None else until - summary.began, what, detail)


def _moment(summary: RequestSummary, at: float, what: str, detail: str = "") -> TimelineSpan:
    return TimelineSpan(at - summary.began, None, what, detail)


MAX_ENDED_ROWS = 200  # ended requests listed, of more kept


class LiveRequests:
    """Finds and lists requests.

    Clients choose request ids, so several requests may share one; a response id is ours and unique.
    """

    def __init__(self, telemetry: Telemetry, history: History, reasons: Reasons) -> None:
        self._telemetry = telemetry
        self._history = history
        self._reasons = reasons

    def records(self) -> Iterator[RequestRecord]:
        """Return the live requests that generate text."""
        return (record for record in self._telemetry.live if record.operation is not None)

    async def listed(self) -> dict[str, Any]:
        """List the live requests, oldest first, and the ended ones, newest first."""
        live = list(self.records())
        shown = nsmallest(MAX_ROWS, live, key=lambda record: record.began)
        ended = list(islice(reversed(self._history.ended), MAX_ENDED_ROWS))
        return {
            "live": await map_in_slices(shown, self._row),
            "recent": await map_in_slices(ended, ended_row),
            "truncated": len(live) - len(shown),
        }

    def of_tenant(self, tenant: str, most: int) -> list[Row]:
        """Return rows of a tenant's ended requests, the newest first."""
        ended = (summary for summary in reversed(self._history.ended) if summary.tenant == tenant)
        return [ended_row(summary) for summary in islice(ended, most)]

    def live_of_tenant(self, tenant: str, most: int) -> list[Row]:
        """Rows of a tenant's live requests, oldest first."""
        live = (record for record in self.records() if record.tenant == tenant)
        return [self._row(record) for record in nsmallest(most, live, key=lambda record: record.began)]

    def shown(self, name: str) -> dict[str, Any]:
        """Return one request with its timeline. Raises `RequestNotFound`."""
        record = _one_of(self.records(), name)
        if record is not None:
            row, summary = self._row(record), RequestSummary.of(record)
        else:
            found = _one_of(reversed(self._history.ended), name)
            if found is None:
                raise RequestNotFound(
                    f"No request {quoted(name, 150)} is live or among the last {MAX_ENDED_REQUESTS} ended ones."
                )
            row, summary = ended_row(found), found
        return detailed(row, summary)

    def live(self, name: str) -> RequestRecord:
        """The record of a live request. Raises `RequestNotFound`."""
        record = _one_of(self.records(), name)
        if record is None:
            raise RequestNotFound(f"No request {quoted(name, 150)} is live.")
        return record

    def _row(self, record: RequestRecord) -> Row:
        return live_row(record, self._reasons, self._telemetry.clock())


class _Named(Protocol):
    request_id: str
    response_id: str | None


Request = TypeVar("Request", bound=_Named)


def _one_of(requests: Iterable[Request], name: str) -> Request | None:
    """Return the request with this response id, else the only one with this request id, else None."""
    namesakes = []
    for request in requests:
        if request.response_id == name:
            return request
        if request.request_id == name:
            namesakes.append(request)
    if len(namesakes) > 1:
        ids = ", ".join(request.response_id or "none yet" for request in namesakes[:8])
        these = f"{len(namesakes)} requests have the id {quoted(name, 150)}"
        raise BadRequest(f"{these}: name one by its response id ({ids}).")
    return namesakes[0] if namesakes else None
