import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.admin.tenants import Tenants
from gateway.api.service import Service
from gateway.background import SLICE
from gateway.tenants.live_policy import LivePolicy
from tests.gateway.admin.test_live_requests import Found
from tests.gateway.telemetry.records import a_record, a_sequence, a_timeline


class Listed(Found):
    def __init__(self) -> None:
        super().__init__()
        service = SimpleNamespace(
            policies=LivePolicy(None),
            keys=SimpleNamespace(tenants=set),
            core=self.core,
            kv_shape=SimpleNamespace(block_bytes=8),
        )
        self.tenants = Tenants(cast(Service, service), self.history, self.requests)

    async def rows(self) -> dict[str, dict[str, Any]]:
        """By name."""
        return {row["name"]: row for row in (await self.tenants.listed())["tenants"]}


@pytest.fixture
def site() -> Listed:
    return Listed()


async def test_a_request_that_ends_while_the_list_is_made_is_counted_once(site: Listed) -> None:
    names = [f"tenant-{number:03d}" for number in range(2 * SLICE)]
    for name in names:
        site.end(a_record(tenant=name, timelines=[a_timeline(sequence=a_sequence(name))]))
    last = a_record(tenant=names[-1], timelines=[a_timeline(sequence=a_sequence(names[-1]))])
    site.telemetry.live.add(last)
    making = asyncio.create_task(site.rows())
    await asyncio.sleep(0)
    site.end(last)
    assert (await making)[names[-1]]["prompt_tokens"] == 20
    assert (await site.rows())[names[-1]]["prompt_tokens"] == 20
