from dataclasses import replace
from pathlib import Path

import pytest

from labs.simulation.arrival import Arrival
from labs.simulation.host import NO_TIME, Host, HostTime, HostTimes
from labs.simulation.traces import read_traffic
from tests.labs.simulation.runs import DEVICE, recorded, write

TIMES = HostTime(step=4e-3, row=3e-4, request=8e-3)


def test_a_step_begins_when_the_tokens_before_it_are_delivered_and_requests_are_read() -> None:
    host = Host(TIMES)
    host.serve()
    assert host.launch(rows=10, now=1.0, done_at=0.0) == pytest.approx(1.0 + 4e-3 + 8e-3), "nothing to deliver"
    assert host.launch(rows=2, now=1.0, done_at=3.0) == pytest.approx(3.0 + 4e-3 + 10 * 3e-4), "behind one in flight"
    assert Host(NO_TIME).launch(rows=10, now=1.0, done_at=3.0) == 3.0


@pytest.mark.parametrize("told", [TIMES, NO_TIME])
def test_a_log_tells_what_its_host_took_between_steps(told: HostTime, tmp_path: Path) -> None:
    """And its requests take as long again as they took."""
    arrivals = [Arrival(n**1.5 * 0.02, 50, 5 + n % 40, tenant="ab"[n % 2]) for n in range(120)]
    recorder, lines = recorded("fair,kv_tokens=40000", arrivals, replace(DEVICE, host=told))
    device = read_traffic(write(tmp_path / "log", *lines)).device
    assert device is not None
    assert device.host.step == pytest.approx(told.step, rel=0.3, abs=1e-4)
    again, _ = recorded("fair,kv_tokens=40000", arrivals, device)
    assert sum(again.durations) == pytest.approx(sum(recorder.durations), rel=0.05)


def test_host_costs_that_equal_rows_cannot_separate_are_the_steps() -> None:
    times = HostTimes()
    times.add(["plan", 0, 0, 2, 0, [], [], None, None, []])
    for step in range(100):
        times.add(["plan", step * 5_000_000 + 1, step + 1, 2, 0, [], [], None, None, []])
        times.add(["done", (step + 1) * 5_000_000, step, 4_000_000, [], [], []])
    fitted = times.fitted
    assert fitted.seconds(rows=2, requests=0) == pytest.approx(1e-3, rel=0.02)
    assert fitted.row < fitted.step / 2
