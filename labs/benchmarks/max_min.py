"""The weighted max-min shares of tenants that do not all have work on the same replicas."""

from collections.abc import Iterable, Mapping
from itertools import combinations

Reach = Mapping[str, frozenset[int]]
"""By tenant, the replicas on which it has work."""


def max_min_shares(
    reach: Reach, weights: Mapping[str, float], capacity: Mapping[int, float] | None = None
) -> dict[str, float]:
    """Returns each tenant's share of the engine time of all replicas: in seconds a second, unless `capacity` says what
    each replica has to give.

    Of all groups of tenants, one that has the least for its weight where nobody else has any is given that; the same is
    then done without it and what it reaches. It takes a time that doubles with each tenant.
    """

    def given(replicas: Iterable[int]) -> float:
        return sum(1.0 if capacity is None else capacity[replica] for replica in replicas)

    shares: dict[str, float] = {}
    taken: frozenset[int] = frozenset()
    while left := [tenant for tenant in reach if tenant not in shares]:
        groups = [group for size in range(1, len(left) + 1) for group in combinations(left, size)]

        def level(group: Iterable[str], taken: frozenset[int] = taken) -> float:
            reached = frozenset[int]().union(*(reach[tenant] for tenant in group))
            return given(reached - taken) / sum(weights[tenant] for tenant in group)

        tight = min(groups, key=level)
        shares |= {tenant: level(tight) * weights[tenant] for tenant in tight}
        taken = taken.union(*(reach[tenant] for tenant in tight))
    return shares
