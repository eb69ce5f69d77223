"""Where the time of one request went."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from gateway.admin.record import Leg, Record


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
