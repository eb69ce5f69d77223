"""What the engine is told of the policy in force."""

from backend.text.tokenizer import Tokenizer
from tests.gateway.paper_gateway import CONFIG, Gateway
from tests.quotas.policies import parsed

BLOCK = 1024  # bytes
LIMITED = "tenants: {{acme: {{weight: {}, prefix_cache: {{floor: {}kB, ceiling: 1MiB}}}}}}"


async def test_the_engine_works_by_the_policy_in_force_and_by_each_that_takes_its_place(
    embedded_tokenizer: Tokenizer,
) -> None:
    gateway = Gateway(embedded_tokenizer)
    service, cache = gateway.service, gateway.scheduler.kv_manager.blocks.cache
    told: list[object] = []
    cache.limit = lambda *limits: told.append(limits)  # type: ignore[method-assign,assignment]
    service.policies.current = parsed(LIMITED.format(2, 3))
    await service.follow_policies()
    assert told == [("acme", -(-3000 // BLOCK), 2**20 // BLOCK)]
    (follow,) = service.policies.on_change
    await follow(parsed(LIMITED.format(3, 4)))
    await follow(parsed("tenants: {acme: {weight: 3}}"))
    assert told[1:] == [("acme", 4, 2**20 // BLOCK), ("acme", 0, None)]
    assert gateway.scheduler.kv_manager.pool.num_free == CONFIG.num_blocks
