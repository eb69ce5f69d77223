import pytest

from admission.core import CoreConfig
from tests.gateway.telemetry.metrics_rig import Rig, rig_after_preemptions


def rig_with_aging(seconds: float) -> Rig:
    return Rig(config=CoreConfig(seconds_per_class=seconds), prefill_chunk=16)


def test_depth_and_age_are_told_for_every_class(rig: Rig) -> None:
    assert rig.labels("sluice_queue_depth", "class") == {"interactive", "standard", "batch"}
    assert rig.value("sluice_queue_depth") == rig.value("sluice_queue_oldest_age_seconds") == 0
    rig.arrive("a", level=1, tenant="acme")
    rig.now += 2
    rig.arrive("b", level=1, tenant="other")
    rig.now += 3
    page = rig.page()
    assert page.value("sluice_queue_depth", **{"class": "standard"}) == page.value("sluice_queue_depth") == 2
    assert page.value("sluice_queue_oldest_age_seconds", **{"class": "standard"}) == pytest.approx(5)
    rig.run()
    assert rig.value("sluice_queue_depth") == rig.value("sluice_queue_oldest_age_seconds") == 0


def test_the_time_in_the_queue_is_known_at_admission(rig: Rig) -> None:
    rig.arrive("a", level=2)
    rig.now += 0.2
    rig.core.schedule(rig.now)
    assert rig.value("sluice_admissions_total", **{"class": "batch"}) == rig.value("sluice_admissions_total") == 1
    assert rig.value("sluice_queue_time_seconds_sum", **{"class": "batch"}) == pytest.approx(0.2)


def test_a_preempted_sequence_is_admitted_once() -> None:
    page = rig_after_preemptions().page()
    assert page.value("sluice_preemptions_total", cause="memory") > 0
    assert page.value("sluice_admissions_total") == 2
    assert page.value("sluice_batch_joined_total") == 2 + page.value("sluice_preemptions_total")


def promotions(rig: Rig) -> tuple[float, float]:
    """Two old ones of a low class and a new urgent one, all of one tenant, where a step has room for one. What is late
    has a quarter of what the tenant is served: one of the old ones goes first.
    """
    for name in ("old", "older"):
        rig.arrive(name, prompt=20, level=2)
    rig.now += 4.0
    rig.arrive("urgent", prompt=20, level=0)
    rig.run()
    page = rig.page()
    return page.value("sluice_promotions_total", **{"class": "batch"}), page.value("sluice_promotions_total")


def test_promotions_count_requests_whose_age_made_up_for_their_class() -> None:
    assert promotions(rig_with_aging(1.0)) == (1, 1)
    assert promotions(rig_with_aging(60.0)) == (0, 0)
