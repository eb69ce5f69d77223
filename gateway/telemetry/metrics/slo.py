"""Which of its targets a sequence has missed."""

from collections.abc import Iterator
from enum import StrEnum

from gateway.telemetry.story import Trail


class Target(StrEnum):
    TTFT = "ttft"  # of its class
    TIME_PER_OUTPUT_TOKEN = "time_per_output_token"  # of its class, or as the client asked  # noqa: S105
    DEADLINE = "deadline"  # of its own


def missed(trail: Trail) -> Iterator[Target]:
    """Of a sequence that was answered or that expired."""
    sequence, first = trail.sequence, trail.first_token
    target = sequence.first_token_target
    if target is not None and (first is None or first - trail.queued > target):
        yield Target.TTFT
    interval = mean_interval(trail)
    if sequence.token_interval is not None and interval is not None and interval > sequence.token_interval:
        yield Target.TIME_PER_OUTPUT_TOKEN
    if _is_late(first, sequence.first_token_by) or _is_late(trail.ended, sequence.done_by):
        yield Target.DEADLINE


def mean_interval(trail: Trail) -> float | None:
    """Seconds from token to token; None where there are fewer than two."""
    gaps = len(trail.sequence.output) - 1
    if trail.first_token is None or trail.ended is None or gaps < 1:
        return None
    return (trail.ended - trail.first_token) / gaps


def _is_late(moment: float | None, deadline: float | None) -> bool:
    return deadline is not None and (moment is None or moment > deadline)
