"""A request to generate text with its deadlines and class, and its prompts as token ids.

How long a client will wait is read from its headers, of which the tightest holds:

x-sluice-ttft-ms             until the first token              ms from now
x-sluice-deadline-ms         until the last                     ms from now
x-sluice-deadline-at         until the last                     a moment: RFC 3339, or Unix seconds
x-request-timeout-seconds    until the last                     Ray
x-llm-d-slo-ttft-ms          until the first token              llm-d
x-llm-d-slo-tpot-ms          between two tokens                 llm-d
x-stainless-read-timeout     the longest silence, in seconds    openai: an answer in one piece is silent until its last
                                                                token, a stream until its first and between tokens
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from math import inf, isfinite

from admission.request import Asked, AskedPrompt
from backend.scheduler.sequence import Sequence
from gateway.errors import BadRequest
from gateway.openai.requests import GenerationRequest
from quotas.policy.policy import ClassPolicy

LONGEST = 30 * 86_400.0  # seconds; a longer wait is taken for no deadline
FIRST, LAST, INTERVAL = "first", "last", "interval"
Headers = Iterable[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class ClientDeadlines:
    """The deadlines of a request, in seconds from its arrival; inf where the client sets none."""

    first_token: float = inf
    last_token: float = inf
    interval: float = inf  # between two tokens
    is_relative: bool = True  # counted from each attempt, so that another one may succeed


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as token ids, and the last of them, whose text the answer continues."""

    token_ids: list[int]
    tail: tuple[int, ...] | list[int]


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """A request, its class of service and its client's deadlines. `arrived` is in seconds of the engine's clock."""

    request: GenerationRequest
    service_class: ClassPolicy
    deadlines: ClientDeadlines
    arrived: float
    num_bytes: int

    @property
    def done_by(self) -> float | None:
        """Returns the moment by which the last token must come; None if the client sets none."""
        seconds = self.deadlines.last_token
        return self.arrived + seconds if seconds < inf else None

    @property
    def first_token_by(self) -> float | None:
        """Returns the moment by which the first token must come: by the client's deadline, and by the target of a
        class that refuses what would be late. None: there is no such moment.
        """
        seconds, target = self.deadlines.first_token, self.service_class.ttft
        if self.service_class.when_late == "refuse" and target is not None:
            seconds = min(seconds, target)
        return self.arrived + seconds if seconds < inf else None

    @property
    def token_interval(self) -> float | None:
        """Returns the seconds promised between two tokens, by the class or the client; None if neither sets any."""
        promised = self.service_class.time_per_output_token
        if self.deadlines.interval == inf:
            return promised
        return min(self.deadlines.interval, promised or inf)

    def as_recorded(
        self,
        request_id: str,
        tenant: str,
        key: str | None,
        sequences: list[Sequence],
        refusal: str | None = None,
    ) -> Asked:
        """Returns the request as the event log records it, with what refused it, if anything did."""
        is_declared, deadlines = self.request.sampling.max_tokens is not None, self.deadlines
        return Asked(
            request_id,
            tenant,
            key,
            self.request.service_tier,
            self.num_bytes,
            _known(deadlines.first_token),
            _known(deadlines.last_token),
            _known(deadlines.interval),
            tuple(AskedPrompt(len(one.prompt), one.max_tokens, is_declared) for one in sequences),
            refusal,
        )


def _known(seconds: float) -> float | None:
    return seconds if seconds < inf else None


NONE = ClientDeadlines()


def read_deadlines(headers: Headers, stream: bool, now: float) -> ClientDeadlines:
    """Returns the tightest deadlines of the headers; `now` is in Unix seconds. Raises `BadRequest` for a wrong one."""
    given = [(name, value) for name, value in headers if name in _NAMES]
    return _tightest(given, stream, now) if given else NONE


def _tightest(headers: Headers, stream: bool, now: float) -> ClientDeadlines:
    tightest = {FIRST: inf, LAST: inf, INTERVAL: inf}
    absolute = inf
    for name, value in headers:
        if name == b"x-stainless-read-timeout":
            seconds = _duration(name, value, 1.0)
            for what in (FIRST, INTERVAL) if stream else (LAST,):
                tightest[what] = min(tightest[what], seconds)
        elif name == b"x-sluice-deadline-at":
            absolute = _until(name, value, now)
        else:
            what, unit = _DURATIONS[name]
            tightest[what] = min(tightest[what], _duration(name, value, unit))
    is_relative = absolute >= tightest[LAST]
    return ClientDeadlines(tightest[FIRST], min(tightest[LAST], absolute), tightest[INTERVAL], is_relative)


_DURATIONS = {
    b"x-sluice-ttft-ms": (FIRST, 1e-3),
    b"x-sluice-deadline-ms": (LAST, 1e-3),
    b"x-request-timeout-seconds": (LAST, 1.0),
    b"x-llm-d-slo-ttft-ms": (FIRST, 1e-3),
    b"x-llm-d-slo-tpot-ms": (INTERVAL, 1e-3),
}


_NAMES = {*_DURATIONS, b"x-sluice-deadline-at", b"x-stainless-read-timeout"}


def _duration(name: bytes, value: bytes, unit: float) -> float:
    seconds = _number(value) * unit
    if not seconds > 0:
        raise _wrong(name, value, "a number above 0")
    return seconds if seconds <= LONGEST else inf


def _until(name: bytes, value: bytes, now: float) -> float:
    seconds = _unix(value) - now
    if not isfinite(seconds):
        raise _wrong(name, value, "a moment such as 2027-01-31T12:00:00Z, or Unix seconds")
    return max(seconds, 0.0) if seconds <= LONGEST else inf


def _unix(value: bytes) -> float:
    number = _number(value)
    if isfinite(number):
        return number
    try:
        moment = datetime.fromisoformat(value.decode("ascii"))
    except ValueError:
        return inf
    return moment.timestamp() if moment.tzinfo else inf


def _number(value: bytes) -> float:
    """Returns the number, or NaN for a value that is no plain finite one."""
    text = value.strip()
    is_plain = len(text) <= 32 and text.replace(b".", b"", 1).isdigit()
    return float(text) if is_plain else float("nan")


def _wrong(name: bytes, value: bytes, expected: str) -> BadRequest:
    header = name.decode()
    return BadRequest(f"The header {header} must be {expected}, got {value[:64]!r}.", header)
