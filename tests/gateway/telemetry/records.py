"""Stories for tests: a request that was served, changed in what a test is about."""

import asyncio
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, cast

from admission.outcome import Outcome
from admission.promise import Promise
from backend.scheduler.sequence import FinishReason, Sequence, SequenceStatus
from gateway.telemetry.request_record import Chunk, EngineRecord, RequestRecord, SequenceTimeline, TraceContext
from quotas.quotas import Grant
from quotas.reservation import Ask
from tests.backend.sequences import make_sequence

BEGAN_NS = 1_800_000_000_000_000_000


def a_sequence(tenant: str = "acme", prompt: int = 10, output: int = 4, **fields: Any) -> Sequence:
    sequence = make_sequence("cmpl-1-0", tenant, [7] * prompt, 16, (), arrival=100.004, **fields)
    sequence.output += [8] * output
    sequence.status, sequence.finish_reason = SequenceStatus.FINISHED, FinishReason.STOP
    return sequence


def a_timeline(**changes: Any) -> SequenceTimeline:
    """Queued at 100.004, in its first step at 100.010, first token at 100.030, ended at 100.070."""
    values: dict[str, Any] = {
        "sequence": a_sequence(),
        "promise": Promise(),
        "queued": 100.004,
        "admitted": 100.010,
        "credit": 0.02,
        "prefilled": 100.030,
        "first_token": 100.030,
        "ended": 100.070,
        "released": 100.071,
        "chunks": [Chunk(3, 0, 6, 100.010), Chunk(4, 6, 4, 100.020)],
    }
    return SequenceTimeline(**(values | changes))


def a_grant(ask: Ask | None = None, settlement: asyncio.Task[None] | None = None) -> Grant:
    """What is read of one when its request has ended; `ask` None: no limit counts."""
    return cast("Grant", SimpleNamespace(reservation=ask and SimpleNamespace(ask=ask), settlement=settlement))


def a_record(**changes: Any) -> RequestRecord:
    """It began at 100.0 and ended at 100.08."""
    values: dict[str, Any] = {
        "request_id": "req_1",
        "method": "POST",
        "path": "/v1/completions",
        "trace": TraceContext(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331),
        "began": 100.0,
        "began_ns": BEGAN_NS,
        "tenant": "acme",
        "key": "k1",
        "model": "embedded",
        "operation": "text_completion",
        "service_class": "standard",
        "policy_version": "v1",
        "response_id": "cmpl-1",
        "authenticated": 100.001,
        "body_read": 100.002,
        "reserving": 100.003,
        "reserved": 100.004,
        "settling": 100.075,
        "first_byte": 100.031,
        "ended": 100.08,
        "timelines": [a_timeline()],
        "outcome": Outcome.COMPLETED,
        "status": 200,
    }
    values |= changes
    of_engine = {field.name: values.pop(field.name) for field in fields(EngineRecord) if field.name in values}
    return RequestRecord(**values, engine=EngineRecord(**of_engine))
