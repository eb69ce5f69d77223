import orjson
import pytest

from gateway.replica.state import parse_state
from gateway.version import VERSION
from tests.gateway.telemetry.metrics_rig import Rig
from tests.gateway.telemetry.records import a_record


def test_an_idle_replica_has_no_work_and_wants_none(rig: Rig) -> None:
    state = rig.metrics.replica.state(draining=False)
    assert (state.running, state.waiting, state.work_seconds, state.replicas_wanted) == (0, {}, 0, 0)
    assert state.kv.free == state.kv.total == 64 * 4
    assert state.token_seconds > 0
    assert not state.draining
    assert rig.metrics.replica.state(draining=True).draining


def test_of_layers_with_a_window_tokens_are_told_that_fit_all_groups() -> None:
    rig = Rig(num_blocks=128, window_groups=3, window_tokens=16)
    assert rig.metrics.replica.state(draining=False).kv.total == 128
    assert rig.page().value("vllm:cache_config_info", block_size="4", num_gpu_blocks="32") == 1
    several = Rig(num_blocks=128, further_windows=((3, 16), (1, 8)))
    told = several.page().value("vllm:cache_config_info", block_size="4", num_gpu_blocks="32")
    assert told == 1, "of the model that needs most"
    rig.arrive("a", prompt=8)
    rig.plan()
    assert rig.metrics.replica.totals().held_tokens == 8


def test_waiting_work_is_told_by_tenant_and_as_metrics(rig: Rig) -> None:
    for name, tenant in (("a", "acme"), ("b", "acme"), ("c", "other")):
        rig.arrive(name, prompt=20, tenant=tenant)
    state = rig.metrics.replica.state(draining=False)
    acme, other = state.waiting["acme"], state.waiting["other"]
    assert (acme.requests, other.requests) == (2, 1)
    assert acme.seconds == pytest.approx(2 * other.seconds)
    pairs = 2 * 20 * 21 // 2
    assert acme.prefill_seconds == pytest.approx(40 * state.token_seconds + pairs * state.step.pair_seconds)
    assert state.work_seconds == pytest.approx(acme.seconds + other.seconds)
    assert state.replicas_wanted == pytest.approx(state.work_seconds / 10)
    page = rig.page()
    assert page.value("sluice_backlog_seconds", tenant="acme") == pytest.approx(acme.seconds)
    assert page.value("sluice_work_seconds") == pytest.approx(state.work_seconds)
    assert page.value("sluice_replicas_wanted") == pytest.approx(state.replicas_wanted)
    fitted = rig.core.step_time.fitted
    assert page.value("sluice_step_time_coefficient_seconds", term="prefill") == fitted.coefficients[1]
    assert len(page.labels("sluice_step_time_coefficient_seconds", "term")) == len(fitted.coefficients)


def test_a_token_of_a_prompt_takes_longer_beside_decodes(rig: Rig) -> None:
    alone = rig.metrics.replica.state(draining=False).token_seconds
    for name in "abc":
        rig.arrive(name, prompt=4, max_tokens=3)  # in fewer steps than the fit is renewed by
    rig.plan()
    assert rig.metrics.replica.state(draining=False).token_seconds == alone, "all of them prefill"
    rig.complete()
    rig.plan()
    assert rig.core.in_flight[-1].batch.num_decodes == 3
    assert rig.metrics.replica.state(draining=False).token_seconds > alone
    rig.complete()
    rig.run()
    assert rig.metrics.replica.state(draining=False).token_seconds == alone


def test_running_work_is_told_by_tenant_with_its_prefix_hits(rig: Rig) -> None:
    for name, tenant in (("a", "acme"), ("b", "acme"), ("c", "other")):
        rig.arrive(name, prompt=4, tenant=tenant)
    rig.step()
    state = rig.metrics.replica.state(draining=False)
    assert state.running_by_tenant == {"acme": 2, "other": 1}
    assert (state.kv.looked_for, state.kv.found) == (12, 0)
    assert parse_state(orjson.dumps(state)).running_by_tenant == state.running_by_tenant


def test_it_tells_its_version_and_that_of_its_policy(rig: Rig) -> None:
    state = rig.metrics.replica.state(draining=False)
    assert (state.version, state.policy) == (VERSION, rig.policies.current.version)


def test_work_shrinks_as_it_is_done(rig: Rig) -> None:
    for number in range(9):
        rig.arrive(str(number), prompt=8, max_tokens=8)
    left = [rig.metrics.replica.work_seconds()]
    while rig.step():
        left.append(rig.metrics.replica.work_seconds())
    assert left[0] > left[len(left) // 2] > left[-1] == 0


def test_where_no_seat_is_left_it_tells_when_one_will_be(rig: Rig) -> None:
    for number in range(9):
        rig.arrive(str(number), prompt=2, max_tokens=8)
    while rig.metrics.replica.state(draining=False).running < 8:
        rig.step()
    rig.plan()
    state = rig.metrics.replica.state(draining=False)
    assert state.seat_seconds > 0
    assert state.step_seconds > 0
    rig.complete()
    rig.run()
    assert rig.metrics.replica.state(draining=False).seat_seconds == 0


def test_bytes_of_a_token_are_learned(rig: Rig) -> None:
    timeline = rig.arrive("a", prompt=10)
    before = rig.metrics.replica.state(draining=False).bytes_per_token
    for _ in range(200):
        rig.metrics.replica.ended(a_record(timelines=[timeline], body_bytes=70))
    assert before < 5
    assert rig.metrics.replica.state(draining=False).bytes_per_token == pytest.approx(7, rel=0.01)
