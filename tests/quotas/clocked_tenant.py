"""A tenant of a store whose clock the test turns, its limits at random, and the random steps that it lives through."""

from collections.abc import Iterable
from datetime import date, timedelta
from uuid import uuid4

from hypothesis import strategies as st

from quotas.policy.limit import Budget, BudgetPeriod, Limit, Rate, Resource, TokenPrices
from quotas.reservation import NOTHING, Usage
from quotas.store.redis_store import RedisStore
from quotas.store.scripts import ScriptRunner

LEASE = 30.0
SPENT = (Resource.REQUESTS, Resource.INPUT_TOKENS, Resource.OUTPUT_TOKENS, Resource.TOKENS)
PRICES = TokenPrices(7, 2, 11, "EUR")
Policy = dict[str | None, list[Limit]]
Steps = list[tuple[object, ...]]

_windows = st.sampled_from([1, 60, 3600]) | st.sampled_from(list(BudgetPeriod))


@st.composite
def _limits(draw: st.DrawFn, key: str | None, amounts: st.SearchStrategy[int], held: tuple[int, int]) -> Limit:
    if draw(st.integers(0, 3)) == 0:
        return Limit(Resource.CONCURRENT_REQUESTS, draw(st.integers(*held)), None, key)
    window, amount = draw(_windows), draw(amounts)
    if isinstance(window, BudgetPeriod):
        if draw(st.integers(0, 3)) == 0:
            return Limit(Resource.COST, 5 * amount, Budget(window), key, PRICES)
        return Limit(draw(st.sampled_from(SPENT)), amount, Budget(window), key)
    return Limit(draw(st.sampled_from(SPENT)), amount, Rate(window, draw(amounts)), key)


def policies_of(
    keys: Iterable[str | None], amounts: st.SearchStrategy[int], held: tuple[int, int], most: int, fewest: int = 1
) -> st.SearchStrategy[Policy]:
    """`fewest` to `most` limits of the tenant and of each key; `held`: the fewest and the most requests at once."""
    limits = {key: _limits(key, amounts, held) for key in keys}
    return st.fixed_dictionaries(
        {
            key: st.lists(one, min_size=fewest, max_size=most, unique_by=lambda limit: limit.name)
            for key, one in limits.items()
        }
    )


async def booked(store: RedisStore, tenant: str, days: Iterable[int]) -> Usage:
    """Sum up what a ledger holds on days that are counted from 1970 on."""
    ledgers = [await store.usage(tenant, date(1970, 1, 1) + timedelta(days=day)) for day in days]
    return sum((usage for ledger in ledgers for usage in ledger.values()), NOTHING)


class ClockedTenant:
    """Steps are calls of its methods by their names."""

    def __init__(self, runner: ScriptRunner, policy: Policy, now: int) -> None:
        self.runner = runner
        self.policy = policy
        self.now = now  # microseconds
        self.tenant = uuid4().hex

    async def live(self, steps: Steps) -> None:
        await self.wait(0)
        for verb, *arguments in steps:
            await getattr(self, str(verb))(*arguments)

    async def wait(self, micros: int) -> None:
        self.now += micros
        await self.runner.client.execute(b"SET", b"test:clock", b"%d" % self.now)

    def limits_of(self, key: str | None) -> tuple[Limit, ...]:
        return (*self.policy[None], *(self.policy[key] if key else ()))

    async def state(self, suffix: str = "") -> dict[bytes, bytes]:
        """Returns what the store has of the tenant."""
        words = await self.runner.client.execute(b"HGETALL", f"sluice:{{{self.tenant}}}{suffix}".encode())
        return dict(zip(words[::2], words[1::2], strict=True))
