"""Limits of cached KV memory, over an engine on paper."""

import pytest

from backend.config import EngineConfig
from gateway.tenants.cache_limits import TENANTS_PER_TURN, CacheLimiter, KVPool, room_problems
from quotas.policy.policy import DEFAULT_POLICY
from tests.quotas.policies import parsed

MIB = 2**20
POOL = KVPool.of(EngineConfig(num_blocks=100, block_size=16, max_model_len=640, max_num_seqs=8), MIB)


class Engine:
    """Remembers what it is told, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, int | None]] = []
        self.fails = False

    def limit_cache(self, tenant: str, floor: int, ceiling: int | None) -> None:
        if self.fails:
            raise RuntimeError
        self.told.append((tenant, floor, ceiling))

    def take(self) -> list[tuple[str, int, int | None]]:
        told, self.told = self.told, []
        return told


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def limiter(engine: Engine) -> CacheLimiter:
    return CacheLimiter(engine.limit_cache, POOL, DEFAULT_POLICY)


async def test_a_floor_is_rounded_up_to_whole_blocks_and_a_ceiling_down(engine: Engine, limiter: CacheLimiter) -> None:
    await limiter.policy_changed(
        parsed(
            "tenants: {a: {prefix_cache: {floor: 1B, ceiling: 2.5MiB}}, b: {prefix_cache: {floor: 2MiB}}, "
            "c: {prefix_cache: {floor: 1kB, ceiling: 2kB}}, d: }"
        )
    )
    assert engine.take() == [("c", 0, 0), ("a", 1, 2), ("b", 2, None)]


async def test_an_edit_tells_the_engine_what_has_changed_and_nothing_else(
    engine: Engine, limiter: CacheLimiter
) -> None:
    await limiter.policy_changed(
        parsed("tenants: {a: {prefix_cache: {floor: 1MiB}}, b: {prefix_cache: {ceiling: 9MiB}}, c: }")
    )
    engine.take()
    edited = parsed(
        "tenants: {a: {prefix_cache: {floor: 1MiB}}, c: {weight: 2}, d: {prefix_cache: {floor: 3MiB, ceiling: 4MiB}}}"
    )
    await limiter.policy_changed(edited)
    assert engine.take() == [("b", 0, None), ("d", 3, 4)]
    await limiter.policy_changed(edited)
    assert engine.take() == []
    await limiter.policy_changed(DEFAULT_POLICY)
    assert engine.take() == [("a", 0, None), ("d", 0, None)]


async def test_floors_are_lowered_before_any_is_raised(engine: Engine, limiter: CacheLimiter) -> None:
    await limiter.policy_changed(
        parsed("tenants: {a: {prefix_cache: {floor: 1MiB}}, b: {prefix_cache: {floor: 5MiB}}}")
    )
    engine.take()
    await limiter.policy_changed(
        parsed("tenants: {a: {prefix_cache: {floor: 5MiB}}, b: {prefix_cache: {floor: 1MiB}}}")
    )
    assert engine.take() == [("b", 1, None), ("a", 5, None)]


async def test_limits_that_failed_to_reach_the_engine_reach_it_with_the_next_edit(
    engine: Engine, limiter: CacheLimiter
) -> None:
    floors = "tenants: {{a: {{prefix_cache: {{floor: 1MiB}}}}, b: {{weight: {}}}}}"
    engine.fails = True
    with pytest.raises(RuntimeError):
        await limiter.policy_changed(parsed(floors.format(1)))
    engine.fails = False
    await limiter.policy_changed(parsed(floors.format(2)))
    assert engine.take() == [("a", 1, None)]


async def test_thousands_of_tenants_are_told_of_in_turns(engine: Engine, limiter: CacheLimiter) -> None:
    names = ", ".join(f"t{number}: " for number in range(3 * TENANTS_PER_TURN))
    await limiter.policy_changed(parsed(f"defaults: {{prefix_cache: {{ceiling: 1MiB}}}}\ntenants: {{{names}}}"))
    assert len(engine.take()) == 3 * TENANTS_PER_TURN


async def test_tenants_that_are_not_named_have_the_ceiling_of_the_defaults_from_their_first_request(
    engine: Engine, limiter: CacheLimiter
) -> None:
    await limiter.policy_changed(parsed("defaults: {prefix_cache: {floor: 1MiB, ceiling: 8MiB}}\ntenants: {a: }"))
    assert engine.take() == [("a", 1, 8)]
    for tenant in ("a", "stranger", "stranger"):
        limiter.use(tenant)
    assert engine.take() == [("stranger", 0, 8)]
    await limiter.policy_changed(parsed("defaults: {prefix_cache: {ceiling: 9MiB}}\ntenants: {a: }"))
    assert engine.take() == [("a", 0, 9), ("stranger", 0, 9)]
    await limiter.policy_changed(parsed("tenants: {a: }"))
    assert engine.take() == [("a", 0, None), ("stranger", 0, None)]
    limiter.use("stranger")
    assert engine.take() == []


def test_floors_that_leave_no_room_are_told_with_the_arithmetic_at_the_largest() -> None:
    policy = parsed("tenants: {a: {prefix_cache: {floor: 20MiB}}, b: {prefix_cache: {floor: 40.5MiB}}}")
    ((field, message),) = room_problems(policy, POOL)
    assert field == "tenants.b.prefix_cache.floor"
    assert message == (
        "floors keep 61.00 MiB (61 blocks) in all, the KV pool has 100.00 MiB (100 blocks), and one sequence of "
        "max_model_len 640 takes 40.00 MiB (40 blocks), so that it could never run: lower floors by 1.00 MiB "
        "(1 block), raise --kv-memory-bytes by as much, or lower --max-model-len"
    )


def test_a_floor_of_the_defaults_counts_for_each_tenant_that_is_named() -> None:
    text = "defaults: {{prefix_cache: {{floor: 20MiB}}}}\ntenants: {{{}}}"
    assert not list(room_problems(parsed(text.format("a: , b: , c: ")), POOL))
    assert list(room_problems(parsed(text.format("a: , b: , c: , d: ")), POOL))
