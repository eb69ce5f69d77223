"""Accounting takes the tokens of a step that was computed to its sequences, and ends those that they end."""

from collections.abc import Sequence as Tokens

from backend.scheduler.batch import NO_TOKEN, Counters
from backend.scheduler.kv_manager import KVManager
from backend.scheduler.scheduled_step import NewToken, ScheduledStep
from backend.scheduler.sequence import FinishReason, Sequence, SequenceStatus

_FINISHED = SequenceStatus.FINISHED  # see `kv_manager`: looking it up takes time


class Accounting:
    """Counts what a step has computed. One that is no longer in flight frees what it alone had named."""

    def __init__(self, kv_manager: KVManager, counters: Counters) -> None:
        self._kv_manager = kv_manager
        self._counters = counters

    def account(self, scheduled: ScheduledStep, token_ids: Tokens[int]) -> list[NewToken]:
        """Take a token to each row of the step that was sampled; returns them, without those that came too late."""
        new_tokens: list[NewToken] = []
        sampled, counters = scheduled.sampled, self._counters
        assert len(sampled) == len(token_ids), f"{len(token_ids)} tokens for {len(sampled)} rows"
        for sequence, token_id in zip(sampled, token_ids):  # noqa: B905 - as the line above says
            if sequence.status is _FINISHED:
                counters.late_tokens += 1
                continue
            if token_id == NO_TOKEN:  # whoever runs the engine ends it, with a word to its client
                new_tokens.append((sequence, NO_TOKEN, None))
                scheduled.failed.append(sequence)
                counters.generation_tokens -= 1  # it is counted below with the others
                continue
            generated = sequence.output
            generated.append(token_id)
            reason = None
            if token_id in sequence.end_tokens or len(generated) >= sequence.max_tokens:
                reason = self._end_of(sequence, token_id)
                if reason is not None:
                    scheduled.ended.append((sequence, reason))
            new_tokens.append((sequence, token_id, reason))
        if scheduled.billed:
            counters.prompt_tokens += sum(tokens for _, tokens in scheduled.billed)
        counters.recomputed_tokens += scheduled.recomputed_tokens
        counters.generation_tokens += len(new_tokens)
        self._kv_manager.free_idle(scheduled.named)
        return new_tokens

    def _end_of(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        """Finish a sequence whose newest token may end it."""
        if token_id in sequence.end_tokens and len(sequence.output) > sequence.sampling.min_tokens:
            reason = FinishReason.STOP
        elif len(sequence.output) >= sequence.max_tokens:
            reason = FinishReason.LENGTH
        else:
            return None
        self._kv_manager.finish(sequence, reason)
        return reason
