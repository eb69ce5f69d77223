"""Summaries of requests, live and ended, for the admin plane.

A `RequestRecord` holds on to prompts and outputs; a summary holds numbers and names.
"""

from dataclasses import dataclass

from admission.outcome import Outcome
from gateway.errors import ApiError
from gateway.telemetry.request_record import RequestRecord, SequenceTimeline

MAX_SEQUENCES = 16  # kept sequences of one request
MAX_MOMENTS = 32  # of one kind and sequence
MAX_TEXT_CHARS = 200  # of a client's text, in characters


@dataclass(slots=True)
class SequenceSummary:
    """Times and counts of one sequence of a request; times are in seconds of the engine's clock."""

    queued: float
    admitted: float | None
    prefilled: float | None
    first_token: float | None
    ended: float | None
    preempted: tuple[float, ...]
    resumed: tuple[float, ...]
    num_chunks: int
    num_prompt_tokens: int
    num_output_tokens: int

    @classmethod
    def of(cls, timeline: SequenceTimeline) -> "SequenceSummary":
        sequence = timeline.sequence
        return cls(
            timeline.queued,
            timeline.admitted,
            timeline.prefilled,
            timeline.first_token,
            timeline.ended,
            tuple(timeline.preempted[:MAX_MOMENTS]),
            tuple(timeline.resumed[:MAX_MOMENTS]),
            len(timeline.chunks),
            sequence.num_prompt_tokens,
            len(sequence.output),
        )


@dataclass(slots=True)
class Refusal:
    """The error sent to a client, without the client's own words."""

    status: int
    code: str | None
    reason: str  # of a fixed vocabulary
    message: str
    param: str | None = None  # the field at fault

    @classmethod
    def of(cls, error: ApiError) -> "Refusal":
        reason = error.dropped_reason or error.code or error.type
        return cls(error.status, error.code, reason, error.discreet_message[:MAX_TEXT_CHARS], error.discreet_param)


@dataclass(slots=True)
class RequestSummary:
    """Times and counts of a request. Times are in seconds of the engine's clock; `began_unix` is in Unix seconds."""

    request_id: str
    response_id: str | None
    tenant: str | None
    key: str | None
    path: str
    model: str | None
    operation: str | None
    service_class: str | None
    began_unix: float
    began: float
    authenticated: float | None
    body_read: float | None
    reserving: float | None
    reserved: float | None
    settling: float | None
    admitted: float | None
    first_token: float | None
    ended: float | None
    outcome: Outcome | None
    status: int
    refusal: Refusal | None
    num_preemptions: int
    num_prompt_tokens: int  # of all its sequences
    num_output_tokens: int
    num_sequences: int  # all, kept or not
    sequences: tuple[SequenceSummary, ...]
    session: str | None  # by the client's word
    trace_id: str
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    engine_seconds: float  # charged

    @classmethod
    def of(cls, record: RequestRecord) -> "RequestSummary":
        return cls(
            record.request_id,
            record.response_id,
            record.tenant,
            record.key,
            record.path[:MAX_TEXT_CHARS],
            record.model and record.model[:MAX_TEXT_CHARS],
            record.operation,
            record.service_class,
            record.began_ns / 1e9,
            record.began,
            record.authenticated,
            record.body_read,
            record.engine.reserving,
            record.engine.reserved,
            record.engine.settling,
            record.engine.admitted,
            record.engine.first_token,
            record.ended,
            record.outcome,
            record.status,
            Refusal.of(record.error) if record.error is not None else None,
            record.engine.num_preemptions,
            record.num_prompt_tokens,
            record.engine.num_output_tokens,
            len(record.engine.timelines),
            tuple([SequenceSummary.of(timeline) for timeline in record.engine.timelines[:MAX_SEQUENCES]]),
            record.session,
            record.trace.trace,
            record.num_cached_tokens,
            record.engine.charged,
        )

    @property
    def queue_seconds(self) -> float | None:
        """Seconds from joining the queue until all sequences were in a step; None while one was not."""
        if self.admitted is None or not self.sequences:
            return None
        return self.admitted - min([sequence.queued for sequence in self.sequences])

    @property
    def ttft(self) -> float | None:
        """Seconds from the request's beginning until the engine had its first token."""
        return None if self.first_token is None else self.first_token - self.began

    def unix(self, moment: float) -> float:
        return self.began_unix + moment - self.began
