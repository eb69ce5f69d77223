from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.labs.core.fleet import Fleet, departure

MOST = 16  # replicas
ONE_OF_FOUR = {"a": frozenset([0]), "b": frozenset(range(4))}


@settings(max_examples=examples(2, at_night=60), deadline=None)
@given(seed=st.integers(0, 2**32), most=st.integers(2, MOST), period=st.sampled_from([0.1, 0.2, 0.5]))
async def test_backlogged_tenants_have_their_max_min_shares_of_replicas_that_come_and_go(
    seed: int, most: int, period: float
) -> None:
    random = Random(seed)
    tenants = "abcde"[: random.randint(2, 5)]
    weights = {tenant: float(random.choice((1, 1, 1, 2, 4))) for tenant in tenants}
    fleet = Fleet(weights, {tenant: random.choice((4, 20, 60)) for tenant in tenants}, random, shares=True)
    for _ in range(3):
        live = [number for number in range(most) if random.random() < 0.8] or [0]
        reach = {
            tenant: frozenset(number for number in live if random.random() < 0.6) or frozenset(live[:1])
            for tenant in tenants
        }
        away = await departure(reach, 6.0, period, fleet)
        late = period * max(weights.values()) / min(weights.values())
        # the bound is for each unit of weight, what a tenant is away from its share in those of the heaviest
        assert away <= len(fleet.replicas) * (max(weights.values()) * fleet.gap_bound + late)


@pytest.mark.parametrize(("shares", "fair"), [(True, (1.0, 3.0)), (False, (0.5, 3.5))])
async def test_a_tenant_on_one_of_four_replicas_is_not_outnumbered(shares: bool, fair: tuple[float, float]) -> None:
    fleet = Fleet({"a": 1.0, "b": 1.0}, {"a": 20, "b": 20}, Random(1), shares)
    away = await departure(ONE_OF_FOUR, 8.0, 0.1, fleet)
    assert [fleet.served[tenant] / 8.0 for tenant in "ab"] == pytest.approx(fair, abs=0.1)
    assert away <= len(fleet.replicas) * (fleet.gap_bound + 0.1) or not shares


async def test_a_tenant_that_returns_after_long_has_no_more_than_its_share() -> None:
    """While it was away, one replica began anew as well, and knows nothing of what was before."""
    fleet = Fleet({"a": 1.0, "b": 1.0}, {"a": 20, "b": 20}, Random(2), shares=True)
    both = frozenset([0, 1])
    for reach in ({"a": both, "b": both}, {"b": frozenset([0])}, {"b": both}, {"a": both, "b": both}):
        away = await departure(reach, 5.0, 0.1, fleet)
        assert away <= len(fleet.replicas) * (fleet.gap_bound + 0.1)


async def test_a_tenant_that_reaches_further_does_not_take_what_others_had() -> None:
    """b has had three times as much as a, which then has work everywhere too: from then on both have as much."""
    fleet = Fleet({"a": 1.0, "b": 1.0}, {"a": 20, "b": 20}, Random(3), shares=True)
    await departure(ONE_OF_FOUR, 20.0, 0.1, fleet)
    away = await departure({"a": ONE_OF_FOUR["b"], "b": ONE_OF_FOUR["b"]}, 10.0, 0.1, fleet)
    assert away <= len(fleet.replicas) * (fleet.gap_bound + 0.1) < 20.0
