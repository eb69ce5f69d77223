"""What the admin port of a router answers, without a socket."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from fleet.admin.api import FleetApi
from fleet.admin.diagnosis import FleetDiagnosis
from fleet.admin.page_files import fleet_page
from fleet.retries import RetryBudget
from gateway.admin.admins import AdminKeys
from gateway.admin.app import AdminApp
from tests.fleet.states import IDLE, work
from tests.fleet.test_fleet import Three

KEY = "correct-horse-battery"


class Asked:
    """A client of the port of a fleet of three."""

    def __init__(self, client: httpx.AsyncClient, fleet: Three, budget: RetryBudget) -> None:
        self._client, self.fleet, self.budget = client, fleet, budget

    async def get(self, path: str, key: str = KEY) -> httpx.Response:
        return await self._client.get(path, headers={"authorization": f"Bearer {key}"})

    async def json(self, path: str) -> Any:
        reply = await self.get(f"/admin/v1/{path}")
        assert reply.status_code == 200, reply.text
        return reply.json()


@pytest.fixture
async def port() -> AsyncIterator[Asked]:
    fleet, budget = Three(), RetryBudget()
    busy = replace(IDLE, running=2, waiting={"a/b c": work(3.0, 2)}, running_by_tenant={"a/b c": 2}, work_seconds=4.0)
    fleet.told(fleet.views["a:8000"], replace(busy, replicas_wanted=0.4), fleet.clock())
    diagnosis = FleetDiagnosis(fleet, budget, httpx.AsyncClient(), KEY)
    api = FleetApi(fleet, budget, diagnosis, lambda tenant: 2.0, lambda: False)
    app = AdminApp(AdminKeys(KEY), api.routes(), fleet_page(), {}, lambda: b"")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        yield Asked(client, fleet, budget)


async def test_the_overview_adds_up_what_replicas_have_told(port: Asked) -> None:
    port.fleet.lost(port.fleet.views["c:8000"])
    port.budget.take("t")
    told = await port.json("overview")
    expected = {"models": ["embedded"], "available": 2, "running": 2, "seats": 16, "waiting": 2, "work_seconds": 4.0}
    assert told | expected == told
    assert (told["retries"], told["retries_left"], told["replicas_wanted"], told["draining"]) == (1, True, 0.4, False)
    assert [(one["name"], one["condition"], one["told"] is None) for one in told["replicas"]] == [
        ("a:8000", "serving", False),
        ("b:8000", "serving", False),
        ("c:8000", "silent", True),
    ]


async def test_the_fleet_has_each_replica_with_its_state(port: Asked) -> None:
    told = await port.json("fleet")
    first = told["replicas"][0]
    assert told["replicas_wanted"] == 0.4
    assert first | {"name": "a:8000", "available": True, "draining": False, "attempts": 0} == first
    assert first["state"]["waiting"]["a/b c"]["requests"] == 2
    assert first["state"]["beginnings"]["cached"] == [], "digests are for routers"
    assert await port.json("fleet/replicas/a:8000") == first
    missing = await port.get("/admin/v1/fleet/replicas/d:8000")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "replica_not_found")


async def test_tenants_of_any_names_are_listed_and_shown(port: Asked) -> None:
    (row,) = (await port.json("fleet/tenants"))["tenants"]
    assert (row["name"], row["waiting"], row["running"], row["weight"]) == ("a/b c", 2, 2, 2.0)
    assert await port.json("fleet/tenants/a%2Fb%20c") == row
    assert (await port.json("fleet/tenants/nobody"))["num_replicas"] == 0


@pytest.mark.parametrize("path", ["overview", "fleet", "fleet/tenants", "fleet/replicas/a:8000", "diagnosis"])
async def test_nothing_is_told_without_the_key(port: Asked, path: str) -> None:
    assert (await port.get(f"/admin/v1/{path}", key="another-key-entirely")).status_code == 401


async def test_the_page_needs_no_key_and_is_held_to_its_own_files(port: Asked) -> None:
    reply = await port.get("/", key="")
    assert (reply.status_code, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'; script-src 'self'" in reply.headers["content-security-policy"]
