from uuid import uuid4

import pytest
from pydantic import ValidationError

from gateway.admin.cut_requests import CutRequest, settle_cut
from gateway.errors import QuotaUnverifiable
from quotas.policy.limit import Budget, BudgetPeriod, Limit, Resource
from quotas.reservation import Ask, Attempt
from quotas.store.redis_store import RedisStore

LIMITS = (Limit(Resource.TOKENS, 1000, Budget(BudgetPeriod.MONTH)),)


async def test_a_request_cut_at_a_router_is_settled_once(redis_url: str) -> None:
    store, tenant, request = RedisStore.at(redis_url, 5.0), uuid4().hex, uuid4().hex
    await store.connect()
    await store.reserve(tenant, None, LIMITS, Ask(1, 10, 500, attempt=Attempt(request, 2)))
    cut = CutRequest(tenant=tenant, request=request, has_begun=True, output_tokens=7)
    assert await settle_cut(store, cut) == {"settled": True}
    assert await settle_cut(store, cut) == {"settled": False}
    (state,) = await store.states(tenant, None, LIMITS)
    assert state.remaining == 1000 - 17
    await store.close()
    with pytest.raises(QuotaUnverifiable):
        await settle_cut(store, cut)


@pytest.mark.parametrize("wrong", [{"request": "*"}, {"output_tokens": -1}, {"tenant": ""}, {"more": 1}])
def test_a_cut_without_a_request_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        CutRequest.model_validate({"tenant": "t", "request": "0" * 32, "has_begun": True} | wrong)
