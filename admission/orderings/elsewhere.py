"""What tenants owe for service on other replicas: each replica orders by its own service and by that of all others.

Now and then a replica learns what others have served each tenant, and charges it as if it had served that itself. So
whoever is served more elsewhere waits longer here, and all replicas together tend to the weighted max-min shares of the
graph of who has work on which replica: nobody could have more but from one that has no more by weight (Megiddo, 1974).

Rounds pay these debts, those of idle tenants too. Of a tenant that reaches further than those it meets here the debt
would grow for as long as they meet. It is bounded, by weight, by `most` for each replica, so that it is soon forgotten
when one of them goes. Where nobody waits, nobody takes a turn from another, and nothing is owed.
"""

from collections.abc import Iterator, Mapping

from admission.orderings.deficit_account import DeficitAccount


class DebtsElsewhere:
    """The debts of one replica's tenants for service on others, in the unit of account; they are part of credits."""

    def __init__(self, quantum: float, most: float) -> None:
        """`most` is what a tenant of weight 1 may owe for each replica."""
        self._quantum, self._most = quantum, most
        self._debts: dict[str, float] = {}
        self._round = 0

    def charge(
        self, accounts: Mapping[str, DeficitAccount], costs: Mapping[str, float], round_: int, replicas: int
    ) -> Iterator[tuple[DeficitAccount, float]]:
        """Add `costs` to the debts, of which the rounds since the last call have paid; yields what each tenant's credit
        changes by.
        """
        granted, self._round = (round_ - self._round) * self._quantum, round_
        debts, self._debts = self._debts, {}
        for tenant in {**debts, **costs}:
            account, before = accounts[tenant], debts.get(tenant, 0.0)
            paid = min(before, granted * account.weight)
            debt = min(before - paid + costs.get(tenant, 0.0), replicas * self._most * account.weight)
            if debt > 0.0:
                self._debts[tenant] = debt
            already = paid if account.is_granted else 0.0  # by its grants
            yield account, before - already - debt

    def forgive(self, tenant: str) -> None:
        """Note that the tenant owes nothing any more, and that its credit is settled."""
        self._debts.pop(tenant, None)
