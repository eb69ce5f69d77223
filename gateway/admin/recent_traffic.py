"""The requests of the last hour: tenants, prompts and lengths of answers."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter

from admission.core import CoreConfig
from admission.request import AssumedRequests, JudgedRequest
from admission.step_times.step_time import StepTime
from backend.config import EngineConfig
from backend.scheduler.sequence import FinishReason, Sequence
from gateway.telemetry.request_record import RequestRecord
from quotas.policy.policy import Policy

HISTORY_SECONDS = 3600.0
MAX_REQUESTS = 20_000  # about a kilobyte each
MAX_PROMPTS = 16  # of one request
_ENDED = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(slots=True)
class RecentRequest:
    at: float  # moment of the charge to its limits
    asked: JudgedRequest
    lengths: list[int | None]  # of its answers; None: cut short or unfinished


@dataclass(frozen=True, slots=True)
class WhatIfQuestion:
    """The input of the process that simulates an edit, beside the requests; `began` is in Unix seconds of the first.

    It is not in `what_if`, which imports torch: that process would take four seconds more to start.
    """

    core: CoreConfig
    engine: EngineConfig
    step_time: StepTime
    block_bytes: int
    model: str
    began: float
    span: float  # seconds from the first request until now
    policy: Policy
    edited: Mapping[str, bytes] | Policy  # the edited policy, or its files by name


class RecentTraffic:
    """Keeps the ended requests, on the event loop; `live` are the unfinished ones."""

    def __init__(self, live: Iterable[RequestRecord]) -> None:
        self._live = live
        self._ended: deque[RecentRequest] = deque(maxlen=MAX_REQUESTS)

    def request_ended(self, record: RequestRecord) -> None:
        engine = record.engine
        if engine.asked is not None and engine.asked_at is not None:
            sequences = [timeline.sequence for timeline in engine.timelines[:MAX_PROMPTS]]
            self._ended.append(RecentRequest(engine.asked_at, engine.asked, list(map(_answered, sequences))))

    def within(self, now: float) -> list[RecentRequest]:
        """The requests of the last hour in order of time, except those refused before their size was known."""
        live = [
            RecentRequest(one.engine.asked_at, one.engine.asked, [])
            for one in self._live
            if one.engine.asked is not None and one.engine.asked_at is not None
        ]
        recent = [request for request in (*self._ended, *live) if now - request.at <= HISTORY_SECONDS]
        as_if_read = AssumedRequests()
        asked = [(request, as_if_read.of(request.asked)) for request in sorted(recent, key=attrgetter("at"))]
        return [replace(request, asked=read) for request, read in asked if read is not None]


def _answered(sequence: Sequence) -> int | None:
    """The length of an answer; None if it was cut short."""
    return max(1, len(sequence.output)) if sequence.finish_reason in _ENDED else None
