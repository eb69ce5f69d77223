from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from fleet.admin import tenants as tenants_module
from fleet.admin.tenants import FleetTenants
from gateway.replica.state import WaitingWork
from tests.fleet.states import IDLE, work
from tests.fleet.test_fleet import ASK, Three


def told(three: Three, name: str, waiting: Mapping[str, WaitingWork], **running: int) -> None:
    three.told(three.views[f"{name}:8000"], replace(IDLE, waiting=waiting, running_by_tenant=running), three.clock())


@pytest.fixture
def three() -> Three:
    """A fleet in which acme waits on two replicas and runs on a third, and bolt waits on one."""
    three = Three()
    told(three, "a", {"acme": work(2.0, 3), "bolt": work(7.0)}, bolt=2)
    told(three, "b", {"acme": work(6.0, 2)}, acme=4)
    told(three, "c", {}, acme=1)
    return three


def tenants(three: Three) -> FleetTenants:
    return FleetTenants(three, lambda name: 3.0 if name == "acme" else 1.0)


async def by_name(three: Three) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in (await tenants(three).listed())["tenants"]}


async def test_a_tenants_work_is_summed_over_the_replicas(three: Three) -> None:
    acme = (await by_name(three))["acme"]
    assert {name: acme[name] for name in ("weight", "waiting", "running", "seconds", "prefill_seconds")} == {
        "weight": 3.0,
        "waiting": 5,
        "running": 5,
        "seconds": 8.0,
        "prefill_seconds": 4.0,
    }
    assert [(one.name, one.waiting, one.running) for one in acme["replicas"]] == [
        ("b:8000", 2, 4),
        ("a:8000", 3, 0),
        ("c:8000", 0, 1),
    ]


async def test_most_work_comes_first_and_what_is_left_out_is_counted(
    three: Three, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [*await by_name(three)] == ["acme", "bolt"]
    monkeypatch.setattr(tenants_module, "MAX_TENANT_ROWS", 1)
    monkeypatch.setattr(tenants_module, "MAX_ROW_REPLICAS", 2)
    answer = await tenants(three).listed()
    (row,) = answer["tenants"]
    assert (row["name"], len(row["replicas"]), row["num_replicas"], answer["truncated"]) == ("acme", 2, 3, 1)
    assert len((await tenants(three).shown("acme"))["replicas"]) == 3


async def test_requests_on_their_way_wait_and_an_idle_tenant_is_all_zeros(three: Three) -> None:
    with ExitStack() as sent:
        sent.enter_context(three.attempt(ASK, three.views["c:8000"]))
        row = (await by_name(three))["t"]
        assert (row["waiting"], row["open_requests"]) == (1, 1)
        assert row["replicas"][0].name == "c:8000"
    row = await tenants(three).shown("t")
    assert (row["waiting"], row["open_requests"], row["replicas"]) == (0, 0, [])


async def test_of_a_lost_replica_nothing_is_counted(three: Three) -> None:
    three.lost(three.views["b:8000"])
    acme = (await by_name(three))["acme"]
    assert (acme["waiting"], acme["running"], acme["num_replicas"]) == (3, 1, 2)
