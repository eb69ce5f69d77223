"""Each alert of a budget is for one replica to send, once in a period."""

import asyncio
from dataclasses import replace
from uuid import uuid4

import pytest

from quotas.errors import BudgetSpent
from quotas.policy.limit import Alert, Budget, BudgetPeriod, Limit, Resource
from quotas.reservation import Ask, Usage
from quotas.store.batches import FinishedLine
from quotas.store.budget_alerts import CLAIM_SECONDS, Crossing, DueAlert
from quotas.store.budget_states import budget_state
from quotas.store.scripts import ScriptRunner
from tests.quotas.store.test_replica import Pair
from tests.quotas.store_model import DAY

URL = "https://example.com/alerts"
LIMIT = Limit(Resource.TOKENS, 1000, Budget(BudgetPeriod.DAY), alerts=(Alert(50, URL), Alert(100, URL)))


class AlertedPair(Pair):
    """Two replicas, and what either is to send."""

    def __init__(self, runner: ScriptRunner, *limits: Limit) -> None:
        super().__init__(runner, *limits)
        self.due: list[DueAlert] = []
        for store in (self.cut, self.other):
            store.alerts.on_due = self.due.append
            store.alerts._clock = lambda: self.tenant.now / 1e6

    async def spend(self, tokens: int) -> None:
        """Each replica has a request of so many tokens answered."""
        for store in (self.cut, self.other):
            await store.settle(await self.reserve(store, Ask(1, tokens, 0)), Usage(tokens))
        await self.claimed()

    async def claimed(self) -> None:
        for store in (self.cut, self.other):
            while store.alerts._claiming:
                await asyncio.wait(store.alerts._claiming)

    @property
    def percents(self) -> list[int]:
        return [due.crossing.alert.percent for due in self.due]

    async def states(self) -> list[str | None]:
        team = self.limits[0].team
        levels = await self.tenant.state(owner=f"team:{team}" if team else None)
        return budget_state(self.limits[0], levels, self.tenant.now).alerts


@pytest.mark.parametrize("owner", ["tenant", "team"])
async def test_one_replica_sends_an_alert_once_in_a_period(runner: ScriptRunner, owner: str) -> None:
    pair = AlertedPair(runner, replace(LIMIT, team=uuid4().hex if owner == "team" else None))
    await pair.tenant.wait(0)
    await pair.spend(240)
    assert pair.due == []
    await pair.spend(20)
    assert (pair.percents, await pair.states()) == ([50], ["sending", None])
    assert pair.due[0].used == 500
    await pair.cut.alerts.ended(pair.due[0].crossing, "sent")
    await pair.spend(100)
    with pytest.raises(BudgetSpent):
        await pair.reserve(pair.other, Ask(1, 300, 0))
    await pair.claimed()
    assert pair.percents == [50, 100], "a refusal is a crossing of the whole"
    assert await pair.states() == ["sent", "sending"]
    await pair.tenant.wait(DAY)
    await pair.spend(250)
    assert pair.percents == [50, 100, 50]
    assert len({due.crossing.id for due in pair.due}) == 3


async def test_a_replica_that_is_lost_while_it_sends_is_replaced_under_the_same_id(runner: ScriptRunner) -> None:
    pair = AlertedPair(runner, replace(LIMIT, amount=10**6))
    await pair.tenant.wait(0)
    await pair.spend(260_000)
    assert pair.percents == [50]
    await pair.tenant.wait(round(CLAIM_SECONDS * 1e6))
    await pair.spend(10)
    first, second = (due.crossing for due in pair.due)
    assert first.id == second.id


async def test_a_soft_budget_refuses_nothing_and_tells_of_each_share(runner: ScriptRunner) -> None:
    pair = AlertedPair(runner, replace(LIMIT, is_soft=True, alerts=(Alert(100, URL), Alert(250, URL))))
    await pair.tenant.wait(0)
    await pair.spend(2000)
    assert sorted(pair.percents) == [100, 250]
    assert await pair.used() == 1000, "none is left"


def test_the_id_of_an_alert_depends_on_its_budget_share_receiver_and_period() -> None:
    crossing = Crossing(b"sluice:{acme}", LIMIT, LIMIT.alerts[0], 20_000)
    others = (
        crossing._replace(levels=b"sluice:{beta}"),
        crossing._replace(alert=LIMIT.alerts[1]),
        crossing._replace(alert=Alert(50, f"{URL}/2")),
        crossing._replace(first_day=20_001),
    )
    assert len({crossing.id, *(other.id for other in others)}) == 5


async def test_a_tenant_whose_use_is_in_batches_alone_is_told_of_it(runner: ScriptRunner) -> None:
    pair = AlertedPair(runner, LIMIT)
    await pair.tenant.wait(0)
    batches, tenant = pair.other.batches(), pair.tenant.tenant
    await batches.open(tenant, "b", {"status": "in_progress"}, 1)
    line = FinishedLine("b", await batches.claim(tenant, "b"), 0, True)
    assert await pair.other.finish_line(tenant, "k", pair.limits, line, Usage(300, 300))
    await pair.claimed()
    assert pair.percents == [50]


async def test_a_share_that_a_running_answer_reaches_is_told_before_another_request(runner: ScriptRunner) -> None:
    pair = AlertedPair(runner, LIMIT)
    await pair.tenant.wait(0)
    reservation = await pair.reserve(pair.other, Ask(1, 300, 100))
    await pair.other.extend(reservation, 100)
    await pair.claimed()
    assert pair.percents == [50]
    with pytest.raises(BudgetSpent):
        await pair.other.extend(reservation, 600)
    await pair.claimed()
    assert pair.percents == [50, 100]
