import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.admin.rows import MAX_ROWS
from gateway.admin.tenants import Tenants
from gateway.api.service import Service
from gateway.background import ITEMS_PER_TURN
from gateway.tenants.live_policy import LivePolicy
from tests.gateway.admin.test_live_requests import Found
from tests.gateway.telemetry.records import a_record, a_sequence, a_timeline


class Listed(Found):
    def __init__(self, policy: Path | None = None) -> None:
        super().__init__()
        service = SimpleNamespace(
            policies=LivePolicy(policy),
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


async def at_once(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


async def test_a_request_that_ends_while_the_list_is_made_is_counted_once(
    site: Listed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio, "to_thread", at_once)
    names = [f"tenant-{number:03d}" for number in range(2 * ITEMS_PER_TURN)]
    for name in names:
        site.end(a_record(tenant=name, timelines=[a_timeline(sequence=a_sequence(name))]))
    last = a_record(tenant=names[-1], timelines=[a_timeline(sequence=a_sequence(names[-1]))])
    site.telemetry.live.add(last)
    making = asyncio.create_task(site.rows())
    await asyncio.sleep(0)
    site.end(last)
    assert (await making)[names[-1]]["prompt_tokens"] == 20
    assert (await site.rows())[names[-1]]["prompt_tokens"] == 20


async def test_of_many_tenants_served_ones_come_first_and_others_are_found_by_words(
    tmp_path: Path,
) -> None:
    names = [f"t{number:04}" for number in range(MAX_ROWS + 500)]
    (tmp_path / "p.yaml").write_text("tenants:\n" + "".join(f"  {name}:\n" for name in names))
    site = Listed(tmp_path / "p.yaml")
    for total in ({}, {"t1400": 3.0, "t1300": 5.0, "stranger": 1.0}):
        site.history.shares.tick(total)
    site.end(a_record(tenant="stranger"))
    listed = await site.tenants.listed()
    assert [row["name"] for row in listed["tenants"]] == ["t1300", "t1400", "stranger", *names[: MAX_ROWS - 3]]
    assert listed["truncated"] == 501
    found = await site.tenants.listed("T149")
    assert [row["name"] for row in found["tenants"]] == [f"t149{digit}" for digit in range(10)]
    assert found["truncated"] == 0
