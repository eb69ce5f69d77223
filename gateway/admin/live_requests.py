"""The requests that are being served, and those that were lately."""

from collections.abc import Iterable, Iterator
from heapq import nsmallest
from itertools import islice
from typing import Any, Protocol, TypeVar

from gateway.admin.history import MAX_ENDED, History
from gateway.admin.record import Record
from gateway.admin.rows import MAX_ROWS, Row, ended_row, live_row
from gateway.admin.timeline import timeline
from gateway.admin.unhurried import unhurried
from gateway.admin.whereabouts import Reasons
from gateway.errors import BadRequest, RequestNotFound
from gateway.telemetry.story import Story
from gateway.telemetry.telemetry import Telemetry

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
