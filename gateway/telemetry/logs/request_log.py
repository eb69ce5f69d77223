"""Writes one log line for each request when it has ended."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from admission.outcome import Outcome
from gateway.telemetry.logs.otlp_log import OtlpLog
from gateway.telemetry.request_record import RequestRecord, Telemetry, Together

log = logging.getLogger(__name__)

MAX_TEXT_CHARS = 200  # of a client's text
GATHER_SECONDS = 0.02  # requests that end within this time are logged together


class RequestLog:
    """A listener of `Telemetry`. Of a client's input it logs only the path, the model's name, the field of a refusal
    and the ignored fields.

    Failures are warnings; requests that need no key and succeed, such as probes and scrapes, are logged for debugging.
    """

    def __init__(self, block_bytes: int, otlp: OtlpLog | None = None) -> None:
        self._block_bytes = block_bytes
        self._otlp = otlp

    def __call__(self, request: RequestRecord) -> None:
        level = _level(request)
        if log.isEnabledFor(level):
            record = logging.LogRecord(log.name, level, "", 0, "request ended", None, None)
            record.fields = fields = self._fields(request)
            log.handle(record)
            if self._otlp is not None:
                self._otlp.put(request, record, fields)

    def _fields(self, request: RequestRecord) -> dict[str, Any]:
        ended, error = request.ended or request.began, request.error
        fields = {
            "method": request.method,
            "path": request.path[:MAX_TEXT_CHARS],
            "status": request.status,
            "outcome": request.outcome,
            "code": None if error is None else error.code or error.type,
            "param": None if error is None else error.discreet_param,
            "error": None if error is None else error.discreet_message[:MAX_TEXT_CHARS],
            "request_id": request.request_id,
            "trace_id": request.trace.trace,
            "tenant": request.tenant,
            "key_id": request.key,
            "seconds": round(ended - request.began, 6),
            "retries": request.num_retries,
        }
        if request.ignored:
            fields["ignored"] = ", ".join(sorted(set(request.ignored)))[:MAX_TEXT_CHARS]
        if request.guardrail_calls:
            fields["guardrail_calls"] = len(request.guardrail_calls)
            fields["guardrail_seconds"] = round(sum([call.ended - call.began for call in request.guardrail_calls]), 6)
        if request.operation is not None:
            self._add_generation(fields, request, ended)
        return fields

    def _add_generation(self, fields: dict[str, Any], request: RequestRecord, ended: float) -> None:
        prompt_tokens = cached_tokens = output_tokens = jumped_tokens = preemptions = 0
        engine, engine_time, block_seconds = request.engine, 0.0, 0.0
        for timeline in engine.timelines:
            sequence = timeline.sequence
            prompt_tokens += sequence.num_prompt_tokens
            cached_tokens += sequence.num_cached_tokens
            output_tokens += len(sequence.output)
            jumped_tokens += timeline.num_jumped_tokens
            preemptions += sequence.num_preemptions
            engine_time += timeline.promise.charged
            block_seconds += sequence.block_seconds(ended)
        if request.num_answers > 1:
            prompt_tokens, cached_tokens = request.num_prompt_tokens, request.num_cached_tokens
        queued, first_token = engine.queued, engine.first_token
        if engine.grammar is not None:
            fields |= {
                "grammar": engine.grammar.name,
                "grammar_kind": engine.grammar.kind,
                "grammar_seconds": None if engine.grammar_wait is None else round(engine.grammar_wait, 6),
                "jump_forward_tokens": jumped_tokens,
            }
        fields |= {
            "operation": request.operation,
            "model": request.model and request.model[:MAX_TEXT_CHARS],
            "class": request.service_class,
            "response_id": request.response_id,
            "prompt_tokens": prompt_tokens,
            "cached_tokens": cached_tokens,
            "output_tokens": output_tokens,
            "queue_seconds": None if queued is None else round((engine.admitted or ended) - queued, 6),
            "first_token_seconds": None if first_token is None else round(first_token - request.began, 6),
            "engine_time": round(engine_time, 9),
            "kv_byte_seconds": round(block_seconds * self._block_bytes),
            "preemptions": preemptions,
        }


@asynccontextmanager
async def log_requests(telemetry: Telemetry, block_bytes: int, otlp: OtlpLog | None = None) -> AsyncIterator[None]:
    """Log each request that ends while the block runs."""
    soon = partial(asyncio.get_running_loop().call_later, GATHER_SECONDS)
    log_ended = Together(RequestLog(block_bytes, otlp), soon)
    telemetry.on_end.append(log_ended)
    try:
        yield
    finally:
        log_ended.flush()


def _level(request: RequestRecord) -> int:
    if request.outcome is Outcome.FAILED:
        return logging.WARNING
    return logging.DEBUG if request.tenant is None and request.outcome is Outcome.COMPLETED else logging.INFO
