"""Traffic of the last hour, as a simulation takes it: who asked for how much, and how long answers became."""

from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from statistics import median_low

from admission.request import Asked
from admission.simulation.arrival import Arrival
from backend.scheduler.sequence import FinishReason
from gateway.telemetry.request_record import RequestRecord

SECONDS = 3600.0
MAX_REQUESTS = 20_000  # a few hundred bytes each
MAX_PROMPTS = 16  # of one request
_ENDED = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(slots=True)
class RecentRequest:
    at: float
    asked: Asked
    lengths: tuple[int | None, ...] = ()  # of its answers; None: not known, because it was cut short or goes on


class RecentTraffic:
    """Remembers requests, on the event loop: each when it has been checked against its limits and when it has ended."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, RecentRequest] = OrderedDict()  # by id, oldest first

    def asked(self, asked: Asked, now: float) -> None:
        self._requests[asked.id] = RecentRequest(now, asked)
        while len(self._requests) > MAX_REQUESTS or now - next(iter(self._requests.values())).at > SECONDS:
            self._requests.popitem(last=False)

    def request_ended(self, record: RequestRecord) -> None:
        request = self._requests.get(record.response_id or "")
        if request is not None:
            sequences = [timeline.sequence for timeline in record.timelines[:MAX_PROMPTS]]
            request.lengths = tuple(max(1, len(s.output)) if s.finish_reason in _ENDED else None for s in sequences)

    def within(self, now: float) -> list[RecentRequest]:
        """Return the requests of the last hour in order of time."""
        return [request for request in self._requests.values() if now - request.at <= SECONDS]


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
    )
