import asyncio
from contextlib import closing

from admission.request import EXTEND_MARGIN_TOKENS as MARGIN
from admission.request import EXTEND_STEP_TOKENS as STEP
from backend.sampling_params import SamplingParams
from backend.scheduler.sequence import PromptRequest, Sequence
from backend.stream import TokenStream
from gateway.api.quota_extender import QuotaExtender
from quotas.errors import BudgetSpent, LimitExceeded, QuotaError
from quotas.policy.limit import Budget, BudgetPeriod, Limit, Rate, Resource

RATE = Limit(Resource.TOKENS, 1000, Rate(60, 1000))
MONTH = Limit(Resource.TOKENS, 1000, Budget(BudgetPeriod.MONTH))


class Grant:
    def __init__(self, *refusals: QuotaError) -> None:
        self.refusals = list(refusals)
        self.extended: list[int] = []

    async def extend(self, output_tokens: int) -> None:
        if self.refusals:
            raise self.refusals.pop(0)
        self.extended.append(output_tokens)


class Admission:
    def raise_token_limit(self, stream: TokenStream, tokens: int) -> None:
        stream.sequence.raise_limit(tokens)


def stream_of(max_tokens: int, allowed: int) -> TokenStream:
    sequence = Sequence(PromptRequest("s", "acme", [1, 2, 3], SamplingParams(), max_tokens, 0, frozenset()))
    sequence.limit_to(allowed)
    return TokenStream(sequence)


async def generate(stream: TokenStream, most: int) -> int:
    """Until it stands still, or `most` tokens are there."""
    while len(stream.sequence.output) < min(most, stream.sequence.token_limit - 3):
        stream.sequence.output.append(7)
        stream.put(None)
        for _ in range(4):
            await asyncio.sleep(0)
    return len(stream.sequence.output)


async def test_an_answer_is_supplied_before_it_has_used_up_what_it_had() -> None:
    grant, failures = Grant(), []
    with closing(QuotaExtender(grant, Admission(), failures.append)) as extender:  # type: ignore[arg-type]
        stream = stream_of(max_tokens=400, allowed=100)
        extender.watch([stream])
        assert await generate(stream, 100 - MARGIN - 1) and not grant.extended
        assert await generate(stream, 400) == 400
    assert grant.extended == [STEP, STEP, 400 - 100 - 2 * STEP]
    assert not failures


async def test_an_answer_of_declared_length_needs_none() -> None:
    grant = Grant()
    with closing(QuotaExtender(grant, Admission(), print)) as extender:  # type: ignore[arg-type]
        stream = stream_of(max_tokens=100, allowed=100)
        extender.watch([stream])
        await generate(stream, 100)
    assert not grant.extended


async def test_a_refusal_is_waited_out() -> None:
    grant, failures = Grant(LimitExceeded(RATE, STEP, 0, 0.001), LimitExceeded(RATE, STEP, 0, 0.001)), []
    with closing(QuotaExtender(grant, Admission(), failures.append)) as extender:  # type: ignore[arg-type]
        stream = stream_of(max_tokens=200, allowed=100)
        extender.watch([stream])
        await generate(stream, 100)
        while not grant.extended:
            await asyncio.sleep(0.001)
        assert await generate(stream, 200) == 200
    assert not failures


async def test_a_spent_budget_ends_the_answer_once_it_stands_still() -> None:
    grant, failures = Grant(BudgetSpent(MONTH, STEP, 0, 2e9)), []
    with closing(QuotaExtender(grant, Admission(), failures.append)) as extender:  # type: ignore[arg-type]
        stream = stream_of(max_tokens=200, allowed=100)
        extender.watch([stream])
        await generate(stream, 100 - MARGIN)
        assert not failures, "it may still end by itself"
        await generate(stream, 100)
        async with asyncio.timeout(240):
            while not failures:
                await asyncio.sleep(0.001)
    assert isinstance(failures[0], BudgetSpent)


async def test_an_answer_that_ends_leaves_no_task_behind() -> None:
    before = asyncio.all_tasks()
    with closing(QuotaExtender(Grant(LimitExceeded(RATE, STEP, 0, 50)), Admission(), print)) as extender:  # type: ignore[arg-type]
        stream = stream_of(max_tokens=200, allowed=100)
        extender.watch([stream])
        await generate(stream, 100)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
