"""Traffic of the last hour, as a simulation takes it: who asked for how much, and how long answers became."""

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from statistics import median_low

from admission.request import AsIfRead, Asked
from admission.simulation.arrival import Arrival
from backend.scheduler.sequence import FinishReason, Sequence
from gateway.telemetry.request_record import RequestRecord

SECONDS = 3600.0
MAX_REQUESTS = 20_000  # about a kilobyte each
MAX_PROMPTS = 16  # of one request
_ENDED = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(slots=True)
class RecentRequest:
    at: float  # when it was checked against its limits
    asked: Asked
    lengths: list[int | None]  # of its answers; None: not known, because it was cut short or goes on
    features: list[tuple[int, ...]] = field(default_factory=list)  # of its prompts, as far as they came to the engine


class RecentTraffic:
    """Remembers the requests that have ended, on the event loop; those of `live` have not."""

    def __init__(self, live: Iterable[RequestRecord]) -> None:
        self._live = live
        self._ended: deque[RecentRequest] = deque(maxlen=MAX_REQUESTS)

    def request_ended(self, record: RequestRecord) -> None:
        if record.asked is not None and record.asked_at is not None:
            sequences = [timeline.sequence for timeline in record.timelines[:MAX_PROMPTS]]
            features = [sequence.features for sequence in sequences]
            self._ended.append(RecentRequest(record.asked_at, record.asked, list(map(_answered, sequences)), features))

    def within(self, now: float) -> list[RecentRequest]:
        """Return the requests of the last hour in order of time, but for those refused unread of which nothing is
        known.
        """
        live = [
            RecentRequest(one.asked_at, one.asked, [])
            for one in self._live
            if one.asked is not None and one.asked_at is not None
        ]
        recent = [request for request in (*self._ended, *live) if now - request.at <= SECONDS]
        as_if_read = AsIfRead()
        asked = [(request, as_if_read.of(request.asked)) for request in sorted(recent, key=attrgetter("at"))]
        return [replace(request, asked=read) for request, read in asked if read is not None]


def _answered(sequence: Sequence) -> int | None:
    """Returns the length of an answer; None if it was cut short."""
    return max(1, len(sequence.output)) if sequence.finish_reason in _ENDED else None


def arrivals_of(requests: list[RecentRequest]) -> list[Arrival]:
    """Return requests as arrivals of a simulation, in the same order, the first at 0 s.

    An answer that was cut short is taken to be as long as it declared, or, where it declared nothing, as the median of
    its tenant's answers.
    """
    usual = _usual_lengths(requests)
    return [
        _arrival(number, request, request.at - requests[0].at, usual.get(request.asked.tenant))
        for number, request in enumerate(requests)
    ]


def _usual_lengths(requests: list[RecentRequest]) -> dict[str, int]:
    lengths: defaultdict[str, list[int]] = defaultdict(list)
    for request in requests:
        lengths[request.asked.tenant] += [length for length in request.lengths if length is not None]
    return {tenant: median_low(found) for tenant, found in lengths.items() if found}


def _arrival(number: int, request: RecentRequest, time: float, usual: int | None) -> Arrival:
    asked = request.asked
    known = [*request.lengths, *[None] * len(asked.prompts)]
    prompts = [
        (
            prompt.prompt_tokens,
            length or (prompt.most if prompt.is_declared or usual is None else min(prompt.most, usual)),
            prompt.most,
        )
        for prompt, length in zip(asked.prompts[:MAX_PROMPTS], known, strict=False)
    ]
    features = [*request.features, *[()] * len(prompts)][: len(prompts)]
    return Arrival(
        time,
        *prompts[0][:2],
        session=number,
        tenant=asked.tenant,
        max_tokens=prompts[0][2],
        deadline=asked.first_token,
        done_within=asked.last_token,
        interval=asked.interval,
        key=asked.key,
        service_tier=asked.service_tier,
        is_declared=asked.prompts[0].is_declared,
        body_bytes=asked.body_bytes,
        refused_by=asked.refusal,
        more_prompts=tuple(prompts[1:]),
        num_answers=asked.num_answers,
        features=features[0],
        more_features=tuple(features[1:]),
    )
