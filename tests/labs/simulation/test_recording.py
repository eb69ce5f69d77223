from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from admission.core import PRIOR_STEP_TIME, CoreConfig
from admission.event_logs.event_log import make_logged_core
from admission.request import JudgedPrompt, JudgedRequest
from admission.step_times.step_time import StepTimeModel
from backend.config import EngineConfig
from backend.scheduler.batch import StepOutput
from labs.simulation.arrival import Arrival
from labs.simulation.contents import Content
from labs.simulation.errors import TraceError
from labs.simulation.recording import TraceFacts
from labs.simulation.traces import read_trace, read_traffic
from tests.backend.sequences import make_sequence
from tests.labs.simulation.runs import DEVICE, recorded, simulated, write


def test_our_own_log_says_whose_each_request_was_and_how_long_its_answer_became(tmp_path: Path) -> None:
    arrivals = [Arrival(n * 0.1, 50, 5 + n, 0, "ab"[n % 2], n % 3, max_tokens=40) for n in range(12)]
    arrivals += [Arrival(2.0, 100, 5, 0, "c", max_tokens=40) for _ in range(7)]
    _, lines = recorded("fair,max_waiting=5,kv_tokens=1024", arrivals)
    read = read_trace(write(tmp_path / "log", *lines))
    assert [(a.prompt_tokens, a.tenant, a.priority_class, a.max_tokens) for a in read] == [
        (a.prompt_tokens, a.tenant, a.priority_class, a.max_tokens) for a in arrivals
    ]
    assert [a.output_tokens for a in read[:12]] == [a.output_tokens for a in arrivals[:12]]
    assert sorted({a.output_tokens for a in read[12:]}) == [5, 40]  # 40: refused, so nobody knows
    assert read[11].time == pytest.approx(1.1)


def test_shared_prefixes_of_a_log_are_hit_again_in_its_simulation(tmp_path: Path) -> None:
    sessions = [Arrival(20.0 * n, 90 + 70 * (n // 3), 40, content=Content.of_session(n % 3)) for n in range(15)]
    unknown = [Arrival(20.0 * n + 10, 200, 8) for n in range(5)]
    recorder, lines = recorded("fair", sorted([*sessions, *unknown]))
    found = recorder.tenants[""].cached_tokens
    traffic = read_traffic(write(tmp_path / "log", *lines))
    again, _, _ = simulated("fair", traffic.arrivals)
    assert again.tenants[""].cached_tokens == found > 1000
    assert traffic.facts.has_contents and sum(arrival.content is None for arrival in traffic.arrivals) == 5
    smaller, _, _ = simulated("fair,block_size=8", traffic.arrivals)
    assert smaller.tenants[""].cached_tokens >= found, "blocks of another size hold the same contents"


def test_a_gateways_log_says_what_was_asked_and_what_limits_refused(tmp_path: Path) -> None:
    """Two prompts of one request, one refused by limits, and an answer of undeclared length."""
    lines: list[str] = []
    core, event_log = make_logged_core(
        CoreConfig(), EngineConfig(num_blocks=64, max_model_len=512), StepTimeModel(PRIOR_STEP_TIME), lines.append
    )
    event_log.serves("embedded", 2048, 1e9, 5.0)
    two = (JudgedPrompt(20, 30, True), JudgedPrompt(10, 30, True))
    open_ended = (JudgedPrompt(15, 200, False),)
    asked = [
        JudgedRequest("one", "acme", "k1", "flex", 99, None, 9.0, 0.5, two),
        JudgedRequest("two", "acme", "k2", None, 77, 3.0, None, None, open_ended, "tokens/min"),
    ]
    core.requested(asked[0], 7.0)
    for index, prompt in enumerate(two):
        core.arrive(make_sequence(f"one-{index}", "acme", prompt.prompt_tokens, 3), 7.0)
    while (batch := core.schedule(7.5)) is not None:
        core.update_from_output(StepOutput(batch.step, [0] * len(batch.sampled), 0.1), 7.5)
    core.requested(asked[1], 8.0)
    read = read_traffic(write(tmp_path / "log", *lines))
    first, second = read.arrivals
    assert (first.prompt_tokens, first.output_tokens, first.more_prompts) == (20, 3, ((10, 3, 30),))
    assert (first.key, first.service_tier, first.body_bytes) == ("k1", "flex", 99)
    assert (first.deadline, first.done_within, first.interval) == (None, 9.0, 0.5)
    assert (second.time, second.refused_by, second.is_declared, second.deadline) == (1.0, "tokens/min", False, 3.0)
    assert (second.prompt_tokens, second.output_tokens, second.max_tokens) == (15, 3, 200)  # as its tenant's others
    assert read.facts == TraceFacts(True, True, True, "embedded", 1e9 + 2.0, is_recorded=True)
    assert read.device is not None and read.device.kv_bytes_per_token == 2048 / 16


def test_a_log_says_to_which_prompt_several_answers_were_wanted(tmp_path: Path) -> None:
    lines: list[str] = []
    core, event_log = make_logged_core(
        CoreConfig(), EngineConfig(num_blocks=64, max_model_len=512), StepTimeModel(PRIOR_STEP_TIME), lines.append
    )
    event_log.serves("embedded", 2048, 1e9, 5.0)
    prompts = tuple(JudgedPrompt(20, 30, True, is_repeated) for is_repeated in (False, True, False, True))
    core.requested(JudgedRequest("one", "acme", "k1", None, 99, None, None, None, prompts), 7.0)
    (request,) = read_traffic(write(tmp_path / "log", *lines)).arrivals
    assert request.num_answers == 2 and [prompt.group for prompt in request.prompts] == [0, 0, 1, 1]


def test_a_recorded_device_takes_as_long_in_all_as_it_was_measured_to(tmp_path: Path) -> None:
    """Every tenth step stalls for half a second, which what is learned leaves out and clients do not."""
    steps = count()
    stalling = replace(DEVICE, seconds=lambda _: 0.5 if next(steps) % 10 == 0 else 0.01)
    arrivals = [Arrival(n * 0.5, 50, 40, tenant="a") for n in range(60)]
    recorder, lines = recorded("fair,kv_tokens=4096", arrivals, stalling)
    device = read_traffic(write(tmp_path / "log", *lines)).device
    assert device is not None
    again, _ = recorded("fair,kv_tokens=4096", arrivals, device)
    assert again.busy / again.steps == pytest.approx(recorder.busy / recorder.steps, rel=0.1)


def test_a_log_without_its_beginning_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="line 1"):
        read_trace(write(tmp_path / "log", '["finish",1.0,"a","stop"]'))
