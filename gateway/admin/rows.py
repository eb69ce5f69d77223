"""Requests as rows of a table."""

from typing import Any

from gateway.admin.record import MAX_WORDS, Record
from gateway.admin.whereabouts import Reasons, state_of
from gateway.telemetry.story import Story

MAX_ROWS = 1000  # of one list

Row = dict[str, Any]


def live_row(story: Story, reasons: Reasons, now: float) -> Row:
    sequences = [trail.sequence for trail in story.trails]
    return _names(story) | {
        "state": state_of(story),
        "age": now - story.began,
        "prompt_tokens": story.num_prompt_tokens,
        "output_tokens": story.num_output_tokens,
        "max_tokens": sum(sequence.max_tokens for sequence in sequences),
        "kv_blocks": sum(len(sequence.block_table) for sequence in sequences),
        "preemptions": story.num_preemptions,
        "reason": reasons.of(story),
    }


def ended_row(record: Record) -> Row:
    assert record.ended is not None
    return _names(record) | {
        "outcome": record.outcome,
        "status": record.status,
        "code": record.refusal.code if record.refusal else None,
        "ended": record.unix(record.ended),
        "duration": record.ended - record.began,
        "queue_seconds": record.queue_seconds,
        "ttft": record.ttft,
        "prompt_tokens": record.num_prompt_tokens,
        "output_tokens": record.num_output_tokens,
        "preemptions": record.num_preemptions,
    }


def refusal_row(record: Record) -> Row:
    assert record.refusal is not None
    assert record.ended is not None
    refusal = record.refusal
    return {
        "at": record.unix(record.ended),
        "id": record.request_id,
        "tenant": record.tenant,
        "path": record.path,
        "status": refusal.status,
        "code": refusal.code,
        "reason": refusal.reason,
        "param": refusal.param,
        "message": refusal.message,
    }


def _names(request: Story | Record) -> Row:
    return {
        "id": request.request_id,
        "response_id": request.response_id,
        "tenant": request.tenant,
        "key": request.key,
        "model": request.model and request.model[:MAX_WORDS],
        "operation": request.operation,
        "class": request.service_class,
    }
