"""What the last minutes tell, of metrics that were made up."""

import pytest

from gateway.doctor.findings import past_findings, past_window
from gateway.doctor.history import figures
from tests.gateway.doctor.snapshots import BEFORE, HEALTHY, snapshot

PER_TOKEN = "gen_ai_server_time_per_output_token_seconds"
TOKENS = {"sluice_decode_tokens_total": 8_000.0, "sluice_prefill_tokens_total": 1_800.0}


def told(**metrics: float) -> dict[str, tuple[str, str]]:
    return {name: (value, meaning) for name, value, meaning in figures(window(metrics))}


def window(metrics: dict[str, float], steps: int = 980):  # type: ignore[no-untyped-def]
    more = {'sluice_step_duration_seconds_count{kind="decode"}': 1000.0 + steps}
    return past_window(100.0, snapshot(100.0, BEFORE).samples, snapshot(400.0, HEALTHY | TOKENS | more | metrics))


def found(metrics: dict[str, float]) -> set[str]:
    now = snapshot(400.0, HEALTHY | TOKENS | {'sluice_step_duration_seconds_count{kind="decode"}': 3000.0} | metrics)
    return {one.name for one in past_findings(past_window(100.0, snapshot(100.0, BEFORE).samples, now))}


def test_the_roofline_the_phases_and_the_tokens_for_each_read_of_the_weights() -> None:
    floor = {"sluice_device_floor_seconds_total": 2.45}
    phases = {
        f'sluice_mixed_steps_seconds_total{{phase="{phase}"}}': own
        for phase, own in (("prefill", 3.0), ("decode", 1.0))
    }
    shown = {name: value for name, value, _ in figures(window(floor | phases))}
    assert shown["of the roofline"] == "50%"
    assert shown["prompts in mixed steps"] == "75%"
    assert shown["tokens a step"] == "10.0"


def test_percentiles_lie_within_their_buckets() -> None:
    buckets = {
        f'{PER_TOKEN}_bucket{{le="{bound}"}}': count for bound, count in (("0.01", 50), ("0.1", 99), ("+Inf", 100))
    }
    value, meaning = told(**buckets)["time per token"]
    assert value == "10 ms" and meaning == "median; p99 100 ms, 10.0 times as long"


def test_waste_and_promises() -> None:
    errors = {
        f'sluice_estimate_error_seconds_count{{token="first",side="{side}"}}': count
        for side, count in (("early", 95), ("late", 5))
    }
    shown = told(sluice_late_tokens_total=98.0, **errors)
    assert shown["wasted tokens"] == ("1.0%", "recomputed 0.0%, late 1.0%, padding 0.0%")
    assert shown["promises kept"][0] == "95%"


def test_padding_is_computed_too() -> None:
    assert told(sluice_padding_tokens_total=19_600.0)["wasted tokens"][0] == "66.7%"


def test_an_engine_that_did_nothing_tells_only_that() -> None:
    assert [name for name, _, _ in figures(window(BEFORE, steps=0))] == ["steps"]


@pytest.mark.parametrize(
    ("name", "metrics"),
    [
        ("far_from_roofline", {"sluice_device_floor_seconds_total": 0.3}),
        ("wasted_work", {"sluice_recomputed_tokens_total": 1_000.0}),
        (
            "uneven_answers",
            {f"{PER_TOKEN}_count": 200.0}
            | {
                f'{PER_TOKEN}_bucket{{le="{bound}"}}': count
                for bound, count in (("0.01", 150), ("0.5", 199), ("+Inf", 200))
            },
        ),
    ],
)
def test_troubles_of_the_last_minutes(name: str, metrics: dict[str, float]) -> None:
    assert name in found(metrics)
    assert name not in found({"sluice_device_floor_seconds_total": 3.0})
