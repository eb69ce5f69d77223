from math import inf

from hypothesis import given
from hypothesis import strategies as st

from gateway.doctor.snapshot import Samples
from gateway.telemetry.metrics.prometheus import exposition
from gateway.telemetry.metrics.registry import Distribution, Family, Kind, Reading

LABELLED = Family("sluice.tenant.tokens", Kind.COUNTER, "", "Tokens.", ("tenant", "kind"))


@given(st.text(st.characters(codec="utf-8"), min_size=1))
def test_any_label_survives_the_text(name: str) -> None:
    text = exposition([Reading(LABELLED, [((name, "prompt"), 3.0)])], (("model_name", "m"),)).decode()
    samples = Samples.parse(text)
    assert samples.total("sluice_tenant_tokens_total", tenant=name) == 3.0


def test_totals_add_up_what_carries_the_labels() -> None:
    points = [(("a", "prompt"), 1.0), (("a", "output"), 2.0), (("b", "output"), 4.0)]
    samples = Samples.parse(exposition([Reading(LABELLED, points)]).decode())
    name = "sluice_tenant_tokens_total"
    assert samples.total(name) == 7.0
    assert samples.total(name, kind="output") == 6.0
    assert samples.total(name, kind="output", tenant="b") == 4.0
    assert samples.total("sluice_unknown") == 0.0


def test_buckets_are_added_up_over_series() -> None:
    family = Family("sluice.queue.time", Kind.HISTOGRAM, "s", "Queue.", ("class",), (0.5, 1.0))
    points = [(("a",), Distribution((1, 2, 3), 9.0)), (("b",), Distribution((1, 0, 0), 0.1))]
    samples = Samples.parse(exposition([Reading(family, points)]).decode())
    assert samples.buckets("sluice_queue_time_seconds") == {0.5: 2.0, 1.0: 4.0, inf: 7.0}
    assert samples.buckets("sluice_queue_time_seconds", **{"class": "b"}) == {0.5: 1.0, 1.0: 1.0, inf: 1.0}
