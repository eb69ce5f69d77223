"""Rows of the admin page's tables of requests, and the reasons for sequences' waits."""

from asyncio import get_running_loop
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from admission.explain import BEHIND_PREFIX, PAUSED_PREFIX, REASONS
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import Sequence, SequenceStatus
from gateway.admin.request_summary import MAX_TEXT_CHARS, RequestSummary
from gateway.telemetry.request_record import RequestRecord

SLOW_CLIENT_SECONDS = 0.5  # without progress of a write: its client counts as slow
_WAITS = frozenset({SequenceStatus.WAITING, SequenceStatus.PREEMPTED})


class State(StrEnum):
    READING = "reading"
    RESERVING = "reserving"
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODING = "decoding"
    ENDING = "ending"


def state_of(record: RequestRecord) -> State:
    """The state of a request: the state of its furthest sequence."""
    if record.body_read is None:
        return State.READING
    if record.engine.settling is not None:
        return State.ENDING
    if not record.engine.timelines:
        return State.RESERVING
    states = {_state(timeline.sequence) for timeline in record.engine.timelines}
    return next(state for state in (State.DECODING, State.PREFILL, State.WAITING, State.ENDING) if state in states)


def is_waiting(sequence: Sequence) -> bool:
    """True if a sequence waits for the engine: not yet admitted, or preempted."""
    return sequence.status in _WAITS


def _state(sequence: Sequence) -> State:
    match sequence.status:
        case SequenceStatus.WAITING | SequenceStatus.PREEMPTED:
            return State.WAITING
        case SequenceStatus.RUNNING:
            return State.DECODING if sequence.output else State.PREFILL
        case SequenceStatus.FINISHED:
            return State.ENDING


class Reasons:
    """The present reasons for waiting or paused sequences, read from a scheduler without changing it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def of(self, record: RequestRecord) -> str | None:
        """The reason why a request does not progress; None if it does."""
        kept = self._first(timeline.sequence for timeline in record.engine.timelines)
        since = record.scope.writing_since if record.scope is not None else None
        if since is not None and (stuck := get_running_loop().time() - since) > SLOW_CLIENT_SECONDS:
            return f"its client reads slowly: a write has waited {stuck:.1f} s"
        return kept

    def _first(self, sequences: Iterable[Sequence]) -> str | None:
        return next((reason for s in sequences if (reason := self.of_sequence(s)) is not None), None)

    def of_sequence(self, sequence: Sequence) -> str | None:
        match sequence.status:
            case SequenceStatus.WAITING | SequenceStatus.PREEMPTED:
                return self._of_waiting(sequence)
            case SequenceStatus.RUNNING:
                return self._of_running(sequence)
        return None

    def _of_waiting(self, sequence: Sequence) -> str:
        scheduler = self._scheduler
        limit = scheduler.held_tenants.get(sequence.tenant)
        if limit is not None:
            return REASONS[limit]
        if scheduler.wait_reason is None:
            is_others = scheduler.in_flight and scheduler.in_flight[-1].batch.model != sequence.request.model
            return REASONS["model"] if is_others else "until the next step is planned"
        reason = REASONS[scheduler.wait_reason]
        head = scheduler.waiting_head
        return reason if head is sequence or head is scheduler.overtaker else BEHIND_PREFIX + reason

    def _of_running(self, sequence: Sequence) -> str | None:
        """The tenant's limit that pauses a running sequence, if one does."""
        if sequence.num_tokens == sequence.token_limit < sequence.request.most_tokens:
            return PAUSED_PREFIX + REASONS["tokens"]
        capacity = len(sequence.block_table.blocks) * self._scheduler.config.block_size
        if (
            sequence.num_computed_tokens >= capacity
            and sequence.tenant in self._scheduler.kv_manager.allowances.requested
        ):
            return PAUSED_PREFIX + REASONS["allowance"]
        return None


MAX_ROWS = 1000  # of one list

Row = dict[str, Any]


def live_row(record: RequestRecord, reasons: Reasons, now: float) -> Row:
    sequences = [timeline.sequence for timeline in record.engine.timelines]
    return _names(record) | {
        "state": state_of(record),
        "age": now - record.began,
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": sum(sequence.num_cached_tokens for sequence in sequences),
        "output_tokens": record.engine.num_output_tokens,
        "max_tokens": sum(sequence.request.max_tokens for sequence in sequences),
        "kv_blocks": sum(sequence.num_blocks for sequence in sequences),
        "preemptions": record.engine.num_preemptions,
        "reason": reasons.of(record),
    }


def ended_row(summary: RequestSummary) -> Row:
    assert summary.ended is not None
    return _names(summary) | {
        "outcome": summary.outcome,
        "status": summary.status,
        "code": summary.refusal.code if summary.refusal else None,
        "ended": summary.unix(summary.ended),
        "duration": summary.ended - summary.began,
        "queue_seconds": summary.queue_seconds,
        "ttft": summary.ttft,
        "prompt_tokens": summary.num_prompt_tokens,
        "cached_tokens": summary.num_cached_tokens,
        "output_tokens": summary.num_output_tokens,
        "preemptions": summary.num_preemptions,
        "engine_seconds": summary.engine_seconds,
        "session": summary.session,
        "trace_id": summary.trace_id,
    }


def refusal_row(summary: RequestSummary) -> Row:
    assert summary.refusal is not None
    assert summary.ended is not None
    refusal = summary.refusal
    return {
        "at": summary.unix(summary.ended),
        "id": summary.request_id,
        "tenant": summary.tenant,
        "path": summary.path,
        "status": refusal.status,
        "code": refusal.code,
        "reason": refusal.reason,
        "param": refusal.param,
        "message": refusal.message,
    }


def _names(request: RequestRecord | RequestSummary) -> Row:
    return {
        "id": request.request_id,
        "response_id": request.response_id,
        "tenant": request.tenant,
        "key": request.key,
        "model": request.model and request.model[:MAX_TEXT_CHARS],
        "operation": request.operation,
        "class": request.service_class,
    }
