"""Keeps the engine's limits on cached KV memory at the policy's values, and refuses policies that leave no room."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from backend.config import EngineConfig
from backend.roofline import show_bytes
from quotas.policy.policy import Policy
from quotas.policy.policy_diff import changed_tenants
from quotas.policy.units import counted

TENANTS_PER_TURN = 100  # tenants whose limits change in one turn of the event loop


@dataclass(frozen=True, slots=True)
class KVPool:
    """The KV memory of one engine."""

    num_blocks: int
    block_bytes: int
    max_model_len: int
    longest: int  # blocks of a sequence of `max_model_len`
    caches: bool = True  # False: idle blocks are not kept
    adapter: int = 0  # blocks of the largest adapter
    blocks_per_place: int = 1  # of a text: one for each group of layers

    @staticmethod
    def of(config: EngineConfig, block_bytes: int) -> "KVPool":
        longest = config.kv_blocks(config.max_model_len)
        per_place, shares = 1 + config.window_groups, config.shares_blocks
        return KVPool(config.num_blocks, block_bytes, config.max_model_len, longest, shares, blocks_per_place=per_place)

    @property
    def most_of_one(self) -> int:
        """Blocks of the longest sequence and its adapter."""
        return self.longest + self.adapter

    @property
    def one_sequence(self) -> str:
        """The longest sequence in words."""
        return f"one sequence of max_model_len {self.max_model_len}{' with the largest adapter' * bool(self.adapter)}"

    def cache_limits(self, policy: Policy, tenant: str) -> tuple[int, int | None]:
        """The tenant's floor and ceiling in whole blocks, rounded down."""
        return blocks_kept(policy, tenant, self.block_bytes)


def blocks_kept(policy: Policy, tenant: str, block_bytes: int) -> tuple[int, int | None]:
    """A tenant's floor and ceiling in whole blocks, rounded down."""
    limits = policy.cache_limits(tenant)
    floor, ceiling = -(-limits.floor // block_bytes), limits.ceiling
    if ceiling is None:
        return floor, None
    most = ceiling // block_bytes
    return min(floor, most), most


def floors_of(policy: Policy, pool: KVPool) -> dict[str, int]:
    """The floor of each tenant that has one, in blocks."""
    return {tenant: pool.cache_limits(policy, tenant)[0] for tenant, kept in policy.caching.items() if kept.floor}


def room_problems(policy: Policy, pool: KVPool) -> Iterator[tuple[str, str]]:
    """Yield a field and its problem, if the policy's floors leave no room for the longest sequence and an adapter."""
    floors = floors_of(policy, pool)
    kept = sum(floors.values())
    lacking = kept + pool.most_of_one - pool.num_blocks
    if not pool.caches or not kept or lacking <= 0:
        return
    largest = max(sorted(floors), key=lambda tenant: floors[tenant])
    sizes = [show_blocks(blocks, pool) for blocks in (kept, pool.num_blocks, pool.most_of_one, lacking)]
    message = (
        f"floors keep {sizes[0]} in all, the KV pool has {sizes[1]}, and {pool.one_sequence} takes "
        f"{sizes[2]}, so that it could never run: lower floors by {sizes[3]}, raise --kv-memory-bytes by as much, or "
        "lower --max-model-len"
    )
    yield f"tenants.{largest}.prefix_cache.floor", message


def show_blocks(blocks: int, pool: KVPool) -> str:
    return f"{show_bytes(blocks * pool.block_bytes)} ({counted(blocks, 'block')})"


class CacheLimiter:
    """Sets the tenants' floors and ceilings in the engine: of named tenants with each policy, of others at their first
    request.
    """

    def __init__(self, limit_cache: Callable[[str, int, int | None], object], pool: KVPool, policy: Policy) -> None:
        """`limit_cache` sets a tenant's floor and ceiling in the engine, in blocks."""
        self._limit_cache = limit_cache
        self._pool = pool
        self._policy = policy
        self._in_force: Policy | None = None  # the policy applied to the engine
        self._limits: dict[str, tuple[int, int | None]] = {}  # present floors and ceilings, by tenant
        self._others: set[str] = set()  # unnamed tenants with requests

    async def policy_changed(self, policy: Policy) -> None:
        """Apply the limits of this policy; floors are lowered before any is raised."""
        self._policy = policy
        changed = await asyncio.to_thread(self._changed, self._in_force, policy, [*self._others])
        for index, tenant in enumerate(changed):
            if index % TENANTS_PER_TURN == TENANTS_PER_TURN - 1:
                await asyncio.sleep(0)
            self._limit(tenant)
        self._in_force = policy

    def _changed(self, before: Policy | None, policy: Policy, others: list[str]) -> list[str]:
        """The tenants whose limits `policy` changes; lowered floors come first."""
        raised: dict[str, bool] = {}
        for tenant in {*changed_tenants(before, policy), *others}:
            present, coming = self._limits.get(tenant, (0, None)), self._pool.cache_limits(policy, tenant)
            if present != coming:
                raised[tenant] = coming[0] > present[0]
        return sorted(raised, key=lambda tenant: (raised[tenant], tenant))

    def use(self, tenant: str) -> None:
        """Announce a request of the tenant."""
        if tenant not in self._others and tenant not in self._policy.tenants:
            self._others.add(tenant)
            self._limit(tenant)

    def _limit(self, tenant: str) -> None:
        limits = floor, ceiling = self._pool.cache_limits(self._policy, tenant)
        if limits == self._limits.get(tenant, (0, None)):
            return
        self._limit_cache(tenant, floor, ceiling)
        if limits == (0, None):
            del self._limits[tenant]
        else:
            self._limits[tenant] = limits
