"""Decides which requests are traced, once they have ended, so that no failed or slow one is missed.

Traces are capped in all and for each tenant. The last half of either allowance is reserved for failed and slow
requests, so they are traced even if clients ask for more traces than the cap.
"""

from collections.abc import Callable
from enum import StrEnum

from gateway.telemetry.request_record import RequestRecord, TraceContext

TENANT_SHARE = 0.25  # of all traces, for one tenant
BURST_SECONDS = 2.0  # of unused allowance
MAX_TENANTS = 1024  # with an allowance of their own; a full one is forgotten first
_RESERVED_SHARE = 0.5


class SamplingReason(StrEnum):
    """The reason for which a request is traced."""

    ERROR = "error"  # it was refused, or failed
    SLOW = "slow"
    CLIENT = "client"  # the client's sampling flag is set
    RATIO = "ratio"


class Allowance:
    """A token bucket of traces; moments are in seconds of any clock."""

    __slots__ = ("_burst", "_level", "_rate", "_since")

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._burst = self._level = max(1.0, rate * BURST_SECONDS)
        self._since = now

    def has(self, reserved: bool, now: float) -> bool:
        """True if one more trace is allowed; `reserved` includes the reserved half."""
        self._fill(now)
        return self._level >= (1.0 if reserved else max(1.0, self._burst * _RESERVED_SHARE))

    def take(self) -> None:
        self._level -= 1.0

    def is_full(self, now: float) -> bool:
        self._fill(now)
        return self._level >= self._burst

    def _fill(self, now: float) -> None:
        self._level = min(self._burst, self._level + max(0.0, now - self._since) * self._rate)
        self._since = now


class TraceSampler:
    """Samples by the parent: a client's own decision holds, and the ratio decides for requests without one.

    Failed and slow requests are traced even against the client's decision.
    """

    def __init__(
        self,
        ratio: float,
        slow_seconds: float,
        most_per_second: float,
        waited: Callable[[RequestRecord], float] | None = None,
    ) -> None:
        """`waited` returns the seconds by which a request counts as slow: `longest_wait` by default."""
        self.num_capped = 0  # requests not traced for the cap
        self._waited = waited or longest_wait
        self._below = round(ratio * 2**64)
        self._slow_seconds = slow_seconds
        self._tenant_rate = most_per_second * TENANT_SHARE
        self._all = Allowance(most_per_second, 0.0)
        self._tenants: dict[str | None, Allowance] = {}

    def reason_to_trace(self, record: RequestRecord) -> SamplingReason | None:
        """The reason to trace an ended request; None if it is not sampled."""
        reason = self._reason(record)
        if reason is None or self._allows(record, reason in (SamplingReason.ERROR, SamplingReason.SLOW)):
            return reason
        self.num_capped += 1
        return None

    def _reason(self, record: RequestRecord) -> SamplingReason | None:
        if record.error is not None:
            return SamplingReason.ERROR
        if record.tenant is None:  # a probe
            return None
        if record.has_failed:
            return SamplingReason.ERROR
        if self._waited(record) >= self._slow_seconds:
            return SamplingReason.SLOW
        trace = record.trace
        if trace.parent_id is not None:
            return SamplingReason.CLIENT if trace.client_samples else None
        return SamplingReason.RATIO if self.picks(trace) else None

    def picks(self, trace: TraceContext) -> bool:
        """True if the ratio samples a trace without a decision."""
        return trace.trace_id % 2**64 < self._below

    def _allows(self, record: RequestRecord, reserved: bool) -> bool:
        now = record.ended if record.ended is not None else record.began
        tenant = self._tenants.get(record.tenant) or self._new_tenant(record.tenant, now)
        if not (tenant.has(reserved, now) and self._all.has(reserved, now)):
            return False
        tenant.take()
        self._all.take()
        return True

    def _new_tenant(self, name: str | None, now: float) -> Allowance:
        if len(self._tenants) >= MAX_TENANTS:
            self._tenants = {name: kept for name, kept in self._tenants.items() if not kept.is_full(now)}
            while len(self._tenants) >= MAX_TENANTS:
                del self._tenants[next(iter(self._tenants))]
        allowance = self._tenants[name] = Allowance(self._tenant_rate, now)
        return allowance


def longest_wait(record: RequestRecord) -> float:
    """Returns the longest wait of a request in seconds: for its first token, for memory, or for its client to read."""
    ended = record.began if record.ended is None else record.ended
    first = record.engine.first_token
    longest = (ended if first is None else first) - record.began
    for timeline in record.engine.timelines:
        if timeline.ended is not None:
            longest = max(longest, ended - timeline.ended)
        if timeline.preempted:
            longest = max(
                longest, _longest_without_memory(timeline.preempted, timeline.resumed, timeline.ended or ended)
            )
    return longest


def _longest_without_memory(preempted: list[float], resumed: list[float], ended: float) -> float:
    back = [*resumed, ended]
    return max(until - since for since, until in zip(preempted, back, strict=False))
