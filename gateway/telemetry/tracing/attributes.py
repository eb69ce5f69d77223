"""The attributes of every span: each function returns those of one kind of span.

Names follow the OpenTelemetry GenAI, HTTP and database conventions as of August 2026 (GenAI: status Development); those
below `sluice.` are ours, since no standard has them. docs/tracing.md promises all of them.
"""

from admission.outcome import Outcome
from backend.grammar import Grammar
from backend.sampling_params import SamplingParams
from gateway.telemetry.core_observer import CompletedStep
from gateway.telemetry.request_record import Chunk, GuardrailCall, RequestRecord, SequenceTimeline, StoreCall
from gateway.telemetry.tracing.http_attributes import of_http
from gateway.telemetry.tracing.span_tree import Attributes
from gateway.tenants.effective_policy import KVShape

PROVIDER = "sluice"


def of_failure(record: RequestRecord) -> dict[str, str]:
    """The reason why a request did not complete, of a fixed vocabulary; empty if it did."""
    error = record.error
    code = "" if error is None else error.code or error.type
    failure = {"error.type": code or str(record.outcome)} if record.has_failed else {}
    if error is not None and record.outcome is not Outcome.FAILED:
        failure["sluice.refusal.code"] = code
    return failure


def of_request(record: RequestRecord, kv: KVShape, now: float) -> Attributes:
    sequences = [timeline.sequence for timeline in record.engine.timelines]
    taken: Attributes = {
        "sluice.kv.peak_bytes": sum(sequence.peak_blocks for sequence in sequences) * kv.block_bytes,
        "sluice.kv.byte_seconds": sum(sequence.block_seconds(now) for sequence in sequences) * kv.block_bytes,
        "sluice.engine.time_us": round(record.engine.charged * 1e6),
        "sluice.preemptions": record.engine.num_preemptions,
    }
    return {
        **of_http(record),
        "sluice.priority.class": record.service_class,
        "sluice.policy.version": record.policy_version,
        **of_failure(record),
        **(taken if sequences else {"gen_ai.request.model": record.model}),
    }


def of_step(step: CompletedStep) -> dict[str, int]:
    batch = step.scheduled.batch
    return {
        "sluice.step.number": batch.step,
        "sluice.step.sequences": len(batch.slots),
        "sluice.step.decodes": step.num_decodes,
        "sluice.step.prefill_tokens": step.prefill_tokens,
        "sluice.step.admitted": len(step.scheduled.admitted),
        "sluice.step.device_us": round(step.elapsed * 1e6),
        "sluice.step.planning_us": round(step.scheduled.planning * 1e6),
    }


def _estimate(record: RequestRecord, kv: KVShape) -> Attributes:
    """Returns the estimates made when the request was queued, and the tokens and KV memory reserved for it."""
    sequences = [timeline.sequence for timeline in record.engine.timelines]
    promises = [timeline.promise for timeline in record.engine.timelines]
    first = [promise.first_token for promise in promises if promise.first_token is not None]
    last = [promise.last_token for promise in promises if promise.last_token is not None]
    reservation = None if record.engine.grant is None else record.engine.grant.reservation
    if reservation is None:
        tokens = sum(sequence.token_limit for sequence in sequences)
    else:
        tokens = reservation.ask.input_tokens + reservation.ask.output_tokens
    return {
        "sluice.estimate.ttft_ms": 1000 * max(first) if first else None,
        "sluice.estimate.total_ms": 1000 * max(last) if last else None,
        "sluice.estimate.tokens": tokens,
        "sluice.estimate.kv_bytes": kv.blocks_for(tokens) * kv.block_bytes,
    }


def of_queue(record: RequestRecord, kv: KVShape, waited: float) -> Attributes:
    credits_ = [timeline.credit for timeline in record.engine.timelines if timeline.credit is not None]
    return {
        "sluice.queue.wait_ms": 1000 * waited,
        "sluice.priority.class": record.service_class,
        "sluice.drr.deficit": credits_[0] if credits_ else None,
        **_estimate(record, kv),
    }


def of_generation(record: RequestRecord) -> Attributes:
    reasons = [timeline.sequence.finish_reason for timeline in record.engine.timelines]
    num_choices = len(record.engine.timelines)
    first_byte = None if record.first_byte is None else record.first_byte - record.began
    return {
        "gen_ai.operation.name": record.operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.output.type": "text",
        "gen_ai.request.model": record.model,
        "gen_ai.request.stream": record.streams or None,
        "gen_ai.request.choice.count": num_choices if num_choices > 1 else None,
        **({} if record.sampling is None else _of_sampling(record.sampling)),
        **({} if record.engine.grammar is None else _of_grammar(record.engine.grammar, record.engine.grammar_wait)),
        "gen_ai.response.id": record.response_id,
        "gen_ai.response.model": record.model,
        "gen_ai.response.finish_reasons": [reason.value for reason in reasons if reason is not None] or None,
        "gen_ai.response.time_to_first_chunk": first_byte if record.streams else None,
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens or None,
        "gen_ai.usage.output_tokens": record.engine.num_output_tokens,
        "sluice.tenant.id": record.tenant,
        "sluice.sequences": num_choices if num_choices > 1 else None,
    }


def of_guardrail_call(call: GuardrailCall) -> Attributes:
    return {"sluice.guardrail.stage": call.stage, "sluice.guardrail.verdict": call.verdict.value}


def _of_sampling(sampling: SamplingParams) -> Attributes:
    return {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k if sampling.top_k > 0 else None,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty or None,
        "gen_ai.request.presence_penalty": sampling.presence_penalty or None,
        "sluice.request.logprobs": sampling.logprobs,
        "sluice.request.prompt_logprobs": sampling.prompt_logprobs,
    }


def _of_grammar(grammar: Grammar, wait: float | None) -> Attributes:
    return {
        "sluice.grammar.kind": grammar.kind.value,
        "sluice.grammar.name": grammar.name,
        "sluice.grammar.wait_ms": None if wait is None else 1000 * wait,
    }


def of_prefill(timeline: SequenceTimeline) -> Attributes:
    return {
        "sluice.sequence.input_tokens": timeline.sequence.num_prompt_tokens,
        "sluice.sequence.cached_tokens": timeline.sequence.num_cached_tokens or None,
        "sluice.prefill.chunks": len(timeline.chunks),
    }


def of_decode(timeline: SequenceTimeline) -> Attributes:
    return {
        "sluice.sequence.output_tokens": len(timeline.sequence.output),
        "sluice.sequence.jump_forward_tokens": timeline.num_jumped_tokens or None,
        "sluice.preemptions": timeline.sequence.num_preemptions or None,
    }


def of_chunk(chunk: Chunk) -> dict[str, int]:
    return {"sluice.step.number": chunk.step, "sluice.chunk.start": chunk.start, "sluice.chunk.tokens": chunk.length}


def of_store_call(call: StoreCall) -> Attributes:
    return {
        "db.system.name": "redis",
        "db.operation.name": "EVALSHA",
        "db.stored_procedure.name": call.name,
        "error.type": call.error,
    }
