"""Searches of the log of requests, as the admin API's queries ask for them."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

from gateway.admin.endpoint import Json
from gateway.admin.live_requests import detailed
from gateway.admin.request_database import RequestDatabase
from gateway.admin.request_storage import LogPosition, RequestSearch
from gateway.admin.request_summary import RequestSummary
from gateway.admin.rows import ended_row
from gateway.errors import BadRequest, RequestLogUnavailable, RequestNotFound
from quotas.policy import units

MAX_ROWS = 500  # of one answer
MAX_NUMBER_CHARS = 24
TEXTS = {
    "tenant": "tenant",
    "key": "key",
    "model": "model",
    "class": "service_class",
    "session": "session",
    "id": "name",
    "outcome": "outcome",
    "code": "code",
}  # fields of a search that are compared as they are, by their names in a query
OTHERS = ("since", "until", "status", "min_seconds", "min_ttft", "limit", "before")

Value = TypeVar("Value")


class RequestLogReader:
    """Answers questions about ended requests from the log, if there is one."""

    def __init__(self, database: RequestDatabase | None, clock: Callable[[], float]) -> None:
        """`clock` gives Unix seconds."""
        self._database = database
        self._clock = clock

    async def listed(self, query: Mapping[str, str]) -> Json:
        """Rows of ended requests, the newest first; `next` continues the search, as `before`. Raises `BadRequest` and
        `RequestLogUnavailable`.
        """
        if self._database is None:
            raise RequestLogUnavailable("The log of requests is off: --request-log-bytes is 0.")
        found, place = await self._database.search(parsed(query, self._clock()))
        return {
            "requests": [ended_row(summary) for summary in found],
            "next": None if place is None else f"{place.ended!r}_{place.number}",
        }

    async def shown(self, name: str) -> Json:
        """One request with its timeline, by its response's id, or by its own id if only one has that. Raises
        `RequestNotFound`, without a log too, `BadRequest` and `RequestLogUnavailable`.
        """
        one = await self._one(name)
        return detailed(ended_row(one), one)

    async def texts(self, name: str) -> Json:
        """The prompts and answers of a request, which is named as for `shown`, and errors as there."""
        one = await self._one(name)
        found = None if self._database is None else await self._database.texts(one.response_id or name)
        if found is None:
            raise RequestNotFound(f"The log has no texts of {name!r:.150}: its tenant's policy has log_texts: none.")
        return {"texts": found}

    async def _one(self, name: str) -> RequestSummary:
        if self._database is None:
            raise RequestNotFound(f"No request {name!r:.150} is live or among the latest ended ones.")
        found, _ = await self._database.search(RequestSearch(name=name))
        exact = [summary for summary in found if summary.response_id == name] or found
        if not exact:
            raise RequestNotFound(f"No request {name!r:.150} is live or in the log.")
        if len(exact) > 1:
            ids = ", ".join(summary.response_id or "none" for summary in exact[:8])
            raise BadRequest(f"{len(exact)} requests have the id {name!r:.150}: name one by its response id ({ids}).")
        return exact[0]


def parsed(query: Mapping[str, str], now: float) -> RequestSearch:
    """Parse a search; empty values filter nothing. Raises `BadRequest` naming the parameter."""
    unknown = query.keys() - TEXTS.keys() - {*OTHERS}
    if unknown:
        known = ", ".join([*TEXTS, *OTHERS])
        raise BadRequest(f"{min(unknown)!r:.40} filters no requests; use {known}.", min(unknown)[:40])
    given = {name: value for name, value in query.items() if value}

    def of(name: str, parse: Callable[[str], Value], form: str) -> Value | None:
        text = given.get(name)
        try:
            return None if text is None else parse(text)
        except (ValueError, OverflowError):
            raise BadRequest(f"{name} must be {form}, got {text!r:.40}.", name) from None

    moment = "a moment such as 2027-01-31T14:00Z, Unix seconds, or a time ago such as 90min or 24h"
    duration = "a duration such as 500ms or 2s"
    texts: dict[str, Any] = {field: given.get(name) for name, field in TEXTS.items()}
    return RequestSearch(
        **texts,
        since=of("since", lambda text: _moment(text, now), moment),
        until=of("until", lambda text: _moment(text, now), moment),
        statuses=of("status", _statuses, "an HTTP status such as 429, or a class of them such as 5xx"),
        min_seconds=of("min_seconds", units.duration, duration),
        min_ttft=of("min_ttft", units.duration, duration),
        before=of("before", _place, "the `next` of an earlier answer"),
        limit=of("limit", _limit, f"a number from 1 to {MAX_ROWS}") or 100,
    )


def _moment(text: str, now: float) -> float:
    if text.replace(".", "", 1).isdigit() and len(text) <= MAX_NUMBER_CHARS:
        return float(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return now - units.duration(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _statuses(text: str) -> tuple[int, int]:
    if len(text) == 3 and text[0] in "12345" and text[1:] == "xx":
        return int(text[0]) * 100, int(text[0]) * 100 + 99
    if not (len(text) == 3 and text.isascii() and text.isdigit()):
        raise ValueError(text)
    return int(text), int(text)


def _limit(text: str) -> int:
    limit = int(text) if text.isascii() and text.isdigit() and len(text) < 5 else 0
    if not 1 <= limit <= MAX_ROWS:
        raise ValueError(text)
    return limit


def _place(text: str) -> LogPosition:
    ended, _, number = text.partition("_")
    if not (number.isascii() and number.isdigit() and len(number) <= 18):
        raise ValueError(text)
    return LogPosition(float(ended), int(number))
