"""The account of use: against a naive one, and what it promises."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from admission.share import ASKING_S, BURST_S, DEBT_LIMIT_BURSTS, GRANTS_PER_BURST, Account, Share

GRANT = BURST_S / GRANTS_PER_BURST
TENANTS = ("acme", "globex", "initech", "umbrella")
WEIGHTS = {"globex": 2.0, "initech": 0.5}


@dataclass
class Naive:
    """Grants by going round, as the docstring of `admission.share` says it."""

    credits: dict[str, float]
    asking: set[str]
    pot: float = 0.0

    def charge(self, tenant: str, seconds: float) -> None:
        self.credits[tenant] = max(self.credits[tenant] - seconds / weight(tenant), -DEBT_LIMIT_BURSTS * BURST_S)
        self.pot += seconds
        if self.pot > GRANT:
            self.grant()

    def grant(self) -> None:
        left, self.pot = self.pot, 0.0
        takers = [name for name in self.asking if self.credits[name] < BURST_S]
        while left > 1e-12 and takers:
            each = left / sum(map(weight, takers))
            step = min([each, *(BURST_S - self.credits[name] for name in takers)])
            for name in takers:
                self.credits[name] += step
            left -= step * sum(map(weight, takers))
            takers = [name for name in takers if self.credits[name] < BURST_S - 1e-9]


def weight(tenant: str) -> float:
    return WEIGHTS.get(tenant, 1.0)


events = st.lists(st.tuples(st.sampled_from(TENANTS), st.floats(0.0, 9.0)), max_size=60)


def asking(*tenants: str, weights: dict[str, float] | None = None) -> tuple[Share, list[Account]]:
    """Accounts of tenants that each have a request open."""
    share = Share(weights)
    accounts = [share.account(tenant) for tenant in tenants]
    for account in accounts:
        share.opened(account)
    return share, accounts


@given(events, st.sets(st.sampled_from(TENANTS), min_size=1))
def test_credits_are_those_of_going_round(charges: list[tuple[str, float]], asking: set[str]) -> None:
    share, naive = Share(WEIGHTS), Naive(dict.fromkeys(TENANTS, 0.0), asking)
    for tenant in asking:
        share.opened(share.account(tenant))
    for tenant, seconds in charges:
        if tenant in asking:
            share.charge(share.account(tenant), seconds)
            naive.charge(tenant, seconds)
    for tenant in asking:
        assert share.credit(share.account(tenant)) == pytest.approx(naive.credits[tenant], abs=1e-6)


@given(st.lists(st.tuples(st.sampled_from(TENANTS), st.floats(0.0, 0.25)), max_size=60))
def test_credit_is_conserved_until_all_have_saved_what_they_may(charges: list[tuple[str, float]]) -> None:
    share = Share(WEIGHTS)
    for tenant in TENANTS:
        share.opened(share.account(tenant))
    for tenant, seconds in charges:
        share.charge(share.account(tenant), seconds)
    owed = {name: share.credit(share.account(name)) for name in TENANTS}
    assert max(owed.values()) <= BURST_S + 1e-9
    total = sum(credit * weight(name) for name, credit in owed.items())
    assert -GRANT - 1e-6 <= total <= 1e-6, "what was taken was granted, but for what is about to be"


def test_a_tenant_that_spends_what_it_saved_is_granted_again_until_it_has_all_of_it() -> None:
    share, (heavy, light) = asking("heavy", "light")
    for _ in range(2):
        for _ in range(40):
            share.charge(heavy, 1.0)
        assert share.credit(light) == BURST_S
        share.charge(light, 6.0)
        assert share.credit(light) == pytest.approx(BURST_S - 3.0), "half of it comes back"


def test_a_tenant_alone_owes_nothing() -> None:
    share = Share()
    acme = share.account("acme")
    share.opened(acme)
    for _ in range(100):
        share.charge(acme, 1.0)
    assert share.credit(acme) == pytest.approx(0, abs=GRANT)


def test_a_tenant_that_asks_for_less_saves_a_burst_and_no_more() -> None:
    share, (light, heavy) = asking("light", "heavy")
    for _ in range(1000):
        share.charge(heavy, 0.1)
    assert share.credit(light) == BURST_S
    assert share.credit(heavy) == pytest.approx(-BURST_S, abs=GRANT), "what the light one cannot take goes back"


def test_a_tenant_ceases_to_ask_some_time_after_its_last_request_and_keeps_its_credit() -> None:
    share = Share()
    light, heavy = share.account("light"), share.account("heavy")
    share.opened(heavy)
    share.set_time(1.0)
    share.asked(light)
    share.charge(heavy, 2.0)
    saved = share.credit(light)
    assert saved == pytest.approx(1.0)
    share.set_time(1.0 + ASKING_S)
    share.charge(heavy, 2.0)
    assert share.credit(light) == saved
    share.set_time(50.0)
    share.asked(light)
    share.charge(heavy, 2.0)
    assert share.credit(light) == pytest.approx(saved + 1.0)


def test_a_debtor_pays_while_it_is_away() -> None:
    share, (debtor, other) = asking("debtor", "other")
    share.charge(debtor, 8.0)
    share.closed(debtor)
    for second in range(3, 60):
        share.set_time(float(second))
        share.charge(other, 1.0)
    assert share.credit(debtor) >= 0.0, "half of what the other used was its share"
    assert share.credit(debtor) <= ASKING_S / 2, "and soon after it owes nothing it takes no more"


def test_weights_divide_what_is_granted() -> None:
    share, (gold, iron, user) = asking("gold", "iron", "user", weights={"gold": 3.0})
    share.charge(user, 10.0)
    assert share.credit(gold) * gold.weight == pytest.approx(6.0)
    assert share.credit(iron) * iron.weight == pytest.approx(2.0)
    assert share.payback(user) == pytest.approx(8.0 * 5.0), "seconds in which its fifth of the engine pays 8"


def test_an_edit_of_weights_keeps_what_each_is_owed() -> None:
    share, (acme, globex) = asking("acme", "globex")
    share.charge(acme, 4.0)
    share.set_policy({"globex": 4.0})
    assert share.credit(globex) * globex.weight == pytest.approx(2.0)
    assert share.credit(acme) == pytest.approx(-2.0)


def test_a_prepayment_that_is_returned_changes_no_credit() -> None:
    share = Share()
    acme = share.account("acme")
    share.opened(acme)
    share.opened(share.account("globex"))
    share.spend(acme, 3.0)
    assert share.credit(acme) == -3.0
    share.spend(acme, -3.0)
    assert share.credit(acme) == 0.0


def test_an_edit_of_weights_gives_a_tenant_that_has_saved_its_limit_no_more_seconds() -> None:
    share, (saver, heavy) = asking("saver", "heavy")
    for _ in range(100):
        share.charge(heavy, 1.0)
    assert share.credit(saver) * saver.weight == BURST_S
    share.set_policy({"saver": 8.0})
    assert share.credit(saver) * saver.weight == pytest.approx(BURST_S)
    for _ in range(200):
        share.charge(heavy, 1.0)
    assert share.credit(saver) == BURST_S, "it saves on, up to the limit of its weight"


def test_an_edit_of_weights_leaves_nobody_beyond_the_most_debt() -> None:
    share, (debtor, other) = asking("debtor", "other", weights={"debtor": 8.0})
    share.waits(debtor, is_waiting=True)
    for _ in range(300):
        share.charge(debtor, 1.0)
    share.set_policy({"debtor": 0.5})
    assert share.credit(debtor) == -DEBT_LIMIT_BURSTS * BURST_S
    share.charge(debtor, 1.0)
    share.waits(other, is_waiting=True)
    share.spend(other, 500.0)
    behind = share.credit(other) - share.credit(debtor)
    assert (share.behind_best(debtor), share.behind_best(other)) == (max(0.0, behind), max(0.0, -behind))
