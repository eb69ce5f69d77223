"""The requests that are being served, and those that were lately."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import nsmallest
from itertools import islice, zip_longest
from typing import Any, Protocol, TypeVar

from gateway.admin.history import MAX_ENDED, History
from gateway.admin.record import Leg, Record
from gateway.admin.rows import MAX_ROWS, Reasons, Row, ended_row, live_row
from gateway.background import unhurried
from gateway.errors import BadRequest, RequestNotFound
from gateway.telemetry.request_record import Story
from gateway.telemetry.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class Span:
    """`at` and `until` in seconds since the request began; `until` is None for a moment, and for what goes on."""

    at: float
    until: float | None
    what: str
    detail: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"at": self.at, "until": self.until, "what": self.what, "detail": self.detail}


def timeline(record: Record) -> list[Span]:
    """In the order in which things began."""
    spans = [*_before(record), *_engine(record), *_after(record)]
    return sorted(spans, key=lambda span: (span.at, _ORDER.index(span.what)))


_ORDER = (
    *("auth", "body", "reserve", "queue", "prefill", "preempted", "resumed"),
    *("first token", "decode", "settle", "end"),
)


def _before(record: Record) -> Iterator[Span]:
    """The engine has it."""
    if record.authenticated is not None:
        yield _span(record, record.began, record.authenticated, "auth", record.tenant or "")
        yield _span(record, record.authenticated, record.body_read, "body")
    if record.reserving is not None:
        yield _span(record, record.reserving, record.reserved, "reserve")


def _engine(record: Record) -> Iterator[Span]:
    for number, leg in enumerate(record.legs, 1):
        whose = f"sequence {number} of {record.num_legs}" if record.num_legs > 1 else ""
        yield from _leg(record, leg, whose)


def _leg(record: Record, leg: Leg, whose: str) -> Iterator[Span]:
    tokens, chunks = leg.num_prompt_tokens, leg.num_chunks
    yield _span(record, leg.queued, leg.admitted or leg.ended, "queue", whose)
    if leg.admitted is not None:
        detail = _joined(f"{tokens} prompt tokens in {chunks} chunk{'' if chunks == 1 else 's'}", whose)
        yield _span(record, leg.admitted, leg.first_token or leg.prefilled or leg.ended, "prefill", detail)
    if leg.first_token is not None:
        yield _moment(record, leg.first_token, "first token", whose)
        yield _span(record, leg.first_token, leg.ended, "decode", _joined(f"{leg.num_output_tokens} tokens", whose))
    for preempted, resumed in zip_longest(leg.preempted, leg.resumed):
        if preempted is not None:
            yield _span(record, preempted, resumed, "preempted", whose)
        if resumed is not None:
            yield _moment(record, resumed, "resumed", whose)


def _after(record: Record) -> Iterator[Span]:
    if record.settling is not None:
        yield _span(record, record.settling, record.ended, "settle")
    if record.ended is not None:
        said = record.refusal.message if record.refusal else ""
        yield _moment(record, record.ended, "end", _joined(str(record.outcome or ""), said))


def _joined(*parts: str) -> str:
    return ": ".join(part for part in parts if part)


def _span(record: Record, at: float, until: float | None, what: str, detail: str = "") -> Span:
    until = record.ended if until is None else until
    return Span(at - record.began, None if until is None else until - record.began, what, detail)


def _moment(record: Record, at: float, what: str, detail: str = "") -> Span:
    return Span(at - record.began, None, what, detail)


MAX_RECENT = 200  # rows of those that have ended, of which more are kept


class LiveRequests:
    """Finds and lists requests. A client chooses its request id, so several may share one; a response id is ours."""

    def __init__(self, telemetry: Telemetry, history: History, reasons: Reasons) -> None:
        self._telemetry = telemetry
        self._history = history
        self._reasons = reasons

    def stories(self) -> Iterator[Story]:
        """Of requests that generate text."""
        return (story for story in self._telemetry.live if story.operation is not None)

    async def listed(self) -> dict[str, Any]:
        """Of those being served, the oldest first; of those that have ended, the newest first."""
        live = list(self.stories())
        shown = nsmallest(MAX_ROWS, live, key=lambda story: story.began)
        ended = list(islice(reversed(self._history.ended), MAX_RECENT))
        return {
            "live": await unhurried(shown, self._row),
            "recent": await unhurried(ended, ended_row),
            "truncated": len(live) - len(shown),
        }

    def of_tenant(self, tenant: str, most: int) -> list[Row]:
        """Those of one that have ended, newest first."""
        ended = (record for record in reversed(self._history.ended) if record.tenant == tenant)
        return [ended_row(record) for record in islice(ended, most)]

    def live_of_tenant(self, tenant: str, most: int) -> list[Row]:
        """Those of one that are being served, the oldest first."""
        live = (story for story in self.stories() if story.tenant == tenant)
        return [self._row(story) for story in nsmallest(most, live, key=lambda story: story.began)]

    def shown(self, name: str) -> dict[str, Any]:
        """One with its timeline. Raises `RequestNotFound`."""
        story = _one_of(self.stories(), name)
        if story is not None:
            row, record = self._row(story), Record.of(story)
        else:
            found = _one_of(reversed(self._history.ended), name)
            if found is None:
                raise RequestNotFound(
                    f"No request {name!r:.150} is being served or among the last {MAX_ENDED} that were."
                )
            row, record = ended_row(found), found
        return row | {"began": record.began_unix, "timeline": [span.to_json() for span in timeline(record)]}

    def live(self, name: str) -> Story:
        """Raises `RequestNotFound`."""
        story = _one_of(self.stories(), name)
        if story is None:
            raise RequestNotFound(f"No request {name!r:.150} is being served.")
        return story

    def _row(self, story: Story) -> Row:
        return live_row(story, self._reasons, self._telemetry.clock())


class _Named(Protocol):
    request_id: str
    response_id: str | None


Request = TypeVar("Request", bound=_Named)


def _one_of(requests: Iterable[Request], name: str) -> Request | None:
    """The one with this response id, else the only one with this request id; None: there is none."""
    namesakes = []
    for request in requests:
        if request.response_id == name:
            return request
        if request.request_id == name:
            namesakes.append(request)
    if len(namesakes) > 1:
        ids = ", ".join(request.response_id or "none yet" for request in namesakes[:8])
        raise BadRequest(f"{len(namesakes)} requests have the id {name!r:.150}: name one by its response id ({ids}).")
    return namesakes[0] if namesakes else None
