"""The quota store as it is measured from outside."""

import pytest

from quotas.errors import StoreUnavailable
from quotas.policy.limit import Limit, Resource
from quotas.reservation import Ask
from quotas.store.scripts import Script
from tests.gateway.telemetry.metrics_rig import Rig


def test_every_script_is_timed_whether_it_succeeds_or_fails() -> None:
    rig = Rig()
    assert rig.page().labels("sluice_store_latency_seconds_count", "script") == set(Script)
    (observed,) = rig.store.on_command
    observed("reserve", 1.0, 1.002, None)
    observed("settle", 2.0, 2.25, StoreUnavailable("gone"))
    page = rig.page()
    assert page.value("sluice_store_latency_seconds_sum", script="reserve") == pytest.approx(0.002)
    assert page.value("sluice_store_latency_seconds_sum", script="settle") == pytest.approx(0.25)
    assert page.value("sluice_store_errors_total", script="settle") == page.value("sluice_store_errors_total") == 1


async def test_its_state_is_read() -> None:
    rig = Rig()
    page = rig.page()
    assert page.value("sluice_store_connected") == 1
    assert page.value("sluice_store_outages_total") == page.value("sluice_reservations_outstanding") == 0
    await rig.store.reserve("a", None, (Limit(Resource.CONCURRENT_REQUESTS, 1),), Ask(1, 1, 1))
    rig.store.is_connected, rig.store.num_outages = False, 2
    page = rig.page()
    assert page.value("sluice_store_connected") == 0
    assert page.value("sluice_store_outages_total") == 2
    assert page.value("sluice_reservations_outstanding") == 1
