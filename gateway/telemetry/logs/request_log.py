"""One log line for each request, when it has ended."""

import logging
from typing import Any

from admission.outcome import Outcome
from gateway.telemetry.request_record import Story

log = logging.getLogger(__name__)

MAX_TEXT = 200  # characters of what a client chose


class RequestLog:
    """A listener of `Telemetry`. Of what a client sent there is the path, the model's name, and of a refusal the field
    that it is about, and nothing else.

    Failures are warnings; what asks for no key and is answered, such as probes and scrapes, is for debugging.
    """

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes

    def __call__(self, story: Story) -> None:
        level = _level(story)
        if log.isEnabledFor(level):
            record = logging.LogRecord(log.name, level, "", 0, "request ended", None, None)
            record.fields = self._fields(story)
            log.handle(record)

    def _fields(self, story: Story) -> dict[str, Any]:
        ended, error = story.ended or story.began, story.error
        fields = {
            "method": story.method,
            "path": story.path[:MAX_TEXT],
            "status": story.status,
            "outcome": story.outcome,
            "code": None if error is None else error.code or error.type,
            "param": None if error is None else error.discreet_param,
            "error": None if error is None else error.discreet_message[:MAX_TEXT],
            "request_id": story.request_id,
            "trace_id": story.trace.trace,
            "tenant": story.tenant,
            "key_id": story.key,
            "seconds": round(ended - story.began, 6),
            "retries": story.num_retries,
        }
        if story.operation is not None:
            fields |= self._generation(story, ended)
        return fields

    def _generation(self, story: Story, ended: float) -> dict[str, Any]:
        prompt_tokens = output_tokens = preemptions = 0
        engine_time = block_seconds = 0.0
        for trail in story.trails:
            sequence = trail.sequence
            prompt_tokens += len(sequence.prompt)
            output_tokens += len(sequence.output)
            preemptions += sequence.num_preemptions
            engine_time += sequence.charged
            block_seconds += sequence.block_seconds(ended)
        queued, first_token = story.queued, story.first_token
        return {
            "operation": story.operation,
            "model": story.model and story.model[:MAX_TEXT],
            "class": story.service_class,
            "response_id": story.response_id,
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "queue_seconds": None if queued is None else round((story.admitted or ended) - queued, 6),
            "first_token_seconds": None if first_token is None else round(first_token - story.began, 6),
            "engine_time": round(engine_time, 9),
            "kv_byte_seconds": round(block_seconds * self._block_bytes),
            "preemptions": preemptions,
        }


def _level(story: Story) -> int:
    if story.outcome is Outcome.FAILED:
        return logging.WARNING
    return logging.DEBUG if story.tenant is None and story.outcome is Outcome.COMPLETED else logging.INFO
