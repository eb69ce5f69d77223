"""How fast the engine lets go of a client that went, and what nobody waits for."""

import pytest

from admission.outcome import Outcome
from gateway.http.request_scope import RequestScope
from gateway.telemetry.request_record import RequestRecord
from tests.gateway.telemetry.metrics_rig import Page, Rig

STOP, RELEASE = "sluice_disconnect_to_stop_seconds", "sluice_disconnect_to_release_seconds"


@pytest.fixture
def rig() -> Rig:
    return Rig()


def leave(rig: Rig, record: RequestRecord, outcome: Outcome = Outcome.DISCONNECTED) -> None:
    """Its client goes now; the engine is told 2 ms later."""
    scope = RequestScope({}, None, None)  # type: ignore[arg-type]  # nothing is received or sent
    scope.outcome, scope.ended_early, record.scope = outcome, rig.now, scope
    rig.now += 0.002
    for timeline in record.timelines:
        if timeline.ended is None:
            rig.cancel(timeline)
    rig.telemetry.ended(record, outcome)


def sums(page: Page) -> tuple[float, float]:
    return page.value(f"{STOP}_sum"), page.value(f"{RELEASE}_sum")


def test_one_that_waits_is_let_go_at_once(rig: Rig) -> None:
    leave(rig, rig.record(rig.arrive("a")))
    assert sums(rig.page()) == (pytest.approx(0.002), pytest.approx(0.002))


def test_memory_is_released_with_the_step_in_flight(rig: Rig) -> None:
    record = rig.record(rig.arrive("a", max_tokens=30))
    rig.step()
    rig.core.schedule(rig.now)
    leave(rig, record)
    assert rig.page().value(f"{RELEASE}_count") == 0
    rig.complete()
    assert sums(rig.page()) == (pytest.approx(0.002), pytest.approx(0.012))
    assert not rig.metrics._disconnects._releasing


def test_other_ends_are_no_disconnects(rig: Rig) -> None:
    leave(rig, rig.record(rig.arrive("a")), Outcome.EXPIRED)
    done = rig.record(rig.arrive("b", max_tokens=2))
    rig.run()
    rig.now += 0.001
    leave(rig, done)  # its answer was complete before
    assert rig.page().value(f"{STOP}_count") == rig.page().value(f"{RELEASE}_count") == 0


def test_orphans_are_streams_without_a_request(rig: Rig) -> None:
    record = rig.record(rig.arrive("a"), rig.arrive("b"))
    rig.engine.num_streams = 2
    assert rig.page().value("sluice_orphans") == 0
    rig.telemetry.live.discard(record)
    assert rig.page().value("sluice_orphans") == 2
