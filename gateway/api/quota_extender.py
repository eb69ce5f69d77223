"""Extends the reservation of an answer of undeclared length: it starts with a few tokens and reserves more."""

import asyncio
from collections.abc import Callable, Iterable

from admission.admission import Admission
from admission.request import EXTEND_MARGIN_TOKENS, EXTEND_STEP_TOKENS, EXTEND_TIMEOUT_S
from backend.stream import TokenStream
from quotas.errors import BudgetSpent, LimitExceeded, QuotaError
from quotas.quotas import Grant

STORE_RETRY_SECONDS = 1.0


class QuotaExtender:
    """Reserves more tokens for the answers of one request while the block runs.

    An answer that needs more than the rest of its tenant's limits pauses, which delays no other request. If the limit
    has no room after `EXTEND_TIMEOUT_S`, or a budget is spent, `fail` is called with the `QuotaError` once the answer
    has paused.
    """

    def __init__(self, grant: Grant, admission: Admission, fail: Callable[[QuotaError], object]) -> None:
        self._grant = grant
        self._admission = admission
        self._fail = fail
        self._tasks: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def watch(self, streams: Iterable[TokenStream]) -> None:
        """Extend these answers, unless they may have all of their tokens already."""
        for stream in streams:
            self._watch(stream)

    def _watch(self, stream: TokenStream) -> None:
        """Reserve more tokens shortly before this answer reaches its limit, up to its maximum."""
        sequence = stream.sequence
        if sequence.token_limit < sequence.request.most_tokens:
            allowed = sequence.token_limit - sequence.num_prompt_tokens
            stream.call_at(allowed - EXTEND_MARGIN_TOKENS, lambda: self._extend_soon(stream))

    def _extend_soon(self, stream: TokenStream) -> None:
        task = asyncio.create_task(self._extend(stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _extend(self, stream: TokenStream) -> None:
        sequence = stream.sequence
        more = min(EXTEND_STEP_TOKENS, sequence.request.most_tokens - sequence.token_limit)
        refusal = await self._refusal_of(more)
        if refusal is None:
            self._admission.raise_token_limit(stream, more)
            self._watch(stream)
        else:
            stream.call_at(sequence.token_limit - sequence.num_prompt_tokens, lambda: self._give_up(stream, refusal))

    async def _refusal_of(self, more: int) -> QuotaError | None:
        """Reserve `more` tokens; returns None, or the error of the last attempt."""
        give_up = asyncio.get_running_loop().time() + EXTEND_TIMEOUT_S
        while True:
            try:
                await self._grant.extend(more)
            except QuotaError as error:
                if isinstance(error, BudgetSpent) or asyncio.get_running_loop().time() > give_up:
                    return error
                wait = error.retry_after if isinstance(error, LimitExceeded) else None
                await asyncio.sleep(min(wait or STORE_RETRY_SECONDS, EXTEND_TIMEOUT_S))
            else:
                return None

    def _give_up(self, stream: TokenStream, refusal: QuotaError) -> None:
        """Report the refusal, unless the last token that was reserved ended the answer."""
        if stream.finish_reason is None:
            self._fail(refusal)
