"""Accounting appends a computed step's tokens to its sequences, and finishes the sequences that they end."""

from backend.scheduler.batch import Counters, PromptLogprobs, StepOutput, TokenLogprobs
from backend.scheduler.kv_manager import KVManager
from backend.scheduler.scheduled_step import NewToken, ScheduledStep
from backend.scheduler.sequence import FinishReason, Sequence, SequenceStatus

_FINISHED = SequenceStatus.FINISHED  # see `kv_manager`: looking it up takes time


class Accounting:
    """Accounts for completed steps, and frees the sequences that only the completed step still named."""

    def __init__(self, kv_manager: KVManager, counters: Counters) -> None:
        self._kv_manager = kv_manager
        self._counters = counters

    def account(self, scheduled: ScheduledStep, output: StepOutput) -> list[NewToken]:
        """Append the sampled token of each row to its sequence; return the new tokens, without late ones."""
        new_tokens: list[NewToken] = []
        sampled, counters, token_ids = scheduled.sampled, self._counters, output.token_ids
        assert len(sampled) == len(token_ids), f"{len(token_ids)} tokens for {len(sampled)} rows"
        if output.prompt_logprobs is not None:
            _take_prompt_logprobs(scheduled, output.prompt_logprobs)
        if output.logprobs is not None:
            _take_logprobs(sampled, token_ids, output.logprobs)
        for index, sequence in enumerate(sampled):
            token_id = token_ids[index]
            if sequence.status is _FINISHED or sequence.num_redundant:
                self._discard(sequence)
                continue
            # no token could be drawn: the engine's owner ends the sequence, with a message to its client
            if token_id < 0:
                new_tokens.append((sequence, token_id, None))
                scheduled.failed.append(sequence)
                counters.generation_tokens -= 1  # it is counted below with the others
                continue
            generated, request = sequence.output, sequence.request
            generated.append(token_id)
            reason = None
            if token_id in request.end_tokens or len(generated) >= request.max_tokens:
                reason = self._end_of(sequence, token_id)
                if reason is not None:
                    scheduled.ended.append((sequence, reason))
            new_tokens.append((sequence, token_id, reason))
            if output.forced is not None and reason is None and index in output.forced:
                scores = None if output.forced_logprobs is None else output.forced_logprobs.get(index)
                self._jump(sequence, output.forced[index], scores, scheduled, new_tokens)
        if scheduled.billed:
            counters.prompt_tokens += sum(tokens for _, tokens in scheduled.billed)
        counters.recomputed_tokens += scheduled.recomputed_tokens
        counters.generation_tokens += len(new_tokens)
        self._kv_manager.free_idle(scheduled.named)
        return new_tokens

    def _discard(self, sequence: Sequence) -> None:
        """Discard a token: the sequence has ended, or the token was forced and taken before."""
        if sequence.status is _FINISHED:
            self._counters.late_tokens += 1
        else:
            sequence.num_redundant -= 1

    def _jump(
        self,
        sequence: Sequence,
        forced: list[int],
        scores: list[TokenLogprobs] | None,
        scheduled: ScheduledStep,
        new_tokens: list[NewToken],
    ) -> None:
        """Take the tokens that follow the token just taken, as far as the sequence may have more by now: forced ones,
        which are the only ones that can, or the tokens drawn behind accepted drafts.

        A step in flight may sample the first of them: it is known before. Forced tokens that no step in flight computes
        are computed together by the next. Of those behind drafts the row has computed all but the last.
        """
        known = sequence.num_prompt_tokens + len(sequence.output)
        num_in_flight, count, is_drafted = sequence.num_tokens - known, 0, bool(scheduled.drafts.get(sequence))
        for token_id in forced[: sequence.token_limit - known]:
            sequence.output.append(token_id)
            if scores is not None and sequence.logprobs is not None:
                sequence.logprobs.append(scores[count])
            count += 1
            sequence.num_computed_tokens += is_drafted
            reason = self._end_of(sequence, token_id)
            new_tokens.append((sequence, token_id, reason))
            if reason is not None:
                scheduled.ended.append((sequence, reason))
                break
        if count:
            scheduled.jumped[sequence] = count
            self._counters.jump_forward_tokens += 0 if is_drafted else count
            sequence.num_redundant = min(num_in_flight, count)
            sequence.num_tokens = max(sequence.num_tokens, known + count)
            sequence.num_admitted_tokens, sequence.jumps = known + count, True

    def _end_of(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        """Finish a sequence if its newest token ends it. A sequence that completes its grammar may end before its
        min_tokens.
        """
        sampling = sequence.request.sampling
        may_end = len(sequence.output) > sampling.min_tokens or sampling.grammar is not None
        if token_id in sequence.request.end_tokens and may_end:
            reason = FinishReason.STOP
        elif len(sequence.output) >= sequence.request.max_tokens:
            reason = FinishReason.LENGTH
        else:
            return None
        self._kv_manager.finish_sequence(sequence, reason)
        return reason


def _take_logprobs(sampled: list[Sequence], token_ids: list[int], logprobs: dict[int, TokenLogprobs]) -> None:
    """Append log probabilities to their sequences, before the tokens themselves are appended."""
    for index, entry in logprobs.items():
        sequence = sampled[index]
        if sequence.logprobs is not None and sequence.status is not _FINISHED and token_ids[index] >= 0:
            sequence.logprobs.append(entry)


def _take_prompt_logprobs(scheduled: ScheduledStep, stretches: list[PromptLogprobs]) -> None:
    """Append prompt log probabilities to their sequences, each position once, even after a recompute.

    Answers to one prompt share one list, so that even a finished one extends it for the others.
    """
    rows = {slot: row for row, slot in enumerate(scheduled.batch.slots)}
    for stretch in stretches:
        known = scheduled.sequences[rows[stretch.slot]].prompt_logprobs
        if known is not None:
            assert stretch.start <= len(known) + 1, "positions of a prompt were passed over"
            known += stretch.tokens[len(known) + 1 - stretch.start :]
