import os
import resource
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from gateway.telemetry.metrics.process import LAG_TICKS
from quotas.errors import StoreUnavailable
from quotas.policy.limit import Limit, Resource
from quotas.reservation import Ask
from quotas.store.scripts import Script
from tests.gateway.telemetry.metrics_rig import Rig


def test_the_loops_lag_is_the_most_of_late(rig: Rig) -> None:
    process = rig.metrics.process
    for lag in (0.0, 0.3, 0.001):
        process.tick(lag)
    assert rig.value("sluice_loop_lag_seconds") == 0.3
    for _ in range(LAG_TICKS):
        process.tick(0.002)
    assert rig.value("sluice_loop_lag_seconds") == 0.002


def test_counters_that_others_keep_are_zero_until_they_are_bound(rig: Rig) -> None:
    assert rig.value("sluice_spans_dropped_total") == 0
    rig.metrics.process.bind("sluice.spans.dropped", lambda: 7)
    assert rig.value("sluice_spans_dropped_total") == 7


def test_live_requests_and_the_policy_are_read(rig: Rig) -> None:
    rig.record()
    assert rig.value("sluice_live_requests") == 1
    assert rig.value("sluice_policy_info", version=rig.policies.current.version) == 1
    rig.policies.num_reloads, rig.policies.num_failures = 3, 1
    assert rig.value("sluice_policy_reloads_total") == 3
    assert rig.value("sluice_policy_reload_failures_total") == 1


def test_process_metrics_equal_the_kernels_figures(rig: Rig) -> None:
    before, stop = rig.page(), threading.Event()
    thread = threading.Thread(target=stop.wait)
    with ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(Path(os.devnull).open())
        thread.start()
        page = rig.page()
        stop.set()
    thread.join()
    assert page.value("process_open_fds") - before.value("process_open_fds") == 5
    assert page.value("process_threads") - before.value("process_threads") == 1
    assert page.value("process_max_fds") == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert 0 < page.value("process_start_time_seconds") <= time.time()
    assert before.value("process_cpu_seconds_total") <= page.value("process_cpu_seconds_total") <= time.process_time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert peak / 4 < page.value("process_resident_memory_bytes") <= peak * 1.01


def test_every_script_is_timed_whether_it_succeeds_or_fails(rig: Rig) -> None:
    assert rig.labels("sluice_store_latency_seconds_count", "script") == set(Script)
    (observed,) = rig.store.on_command
    observed("reserve", 1.0, 1.002, None)
    observed("settle", 2.0, 2.25, StoreUnavailable("gone"))
    assert rig.value("sluice_store_latency_seconds_sum", script="reserve") == pytest.approx(0.002)
    assert rig.value("sluice_store_latency_seconds_sum", script="settle") == pytest.approx(0.25)
    assert rig.value("sluice_store_errors_total", script="settle") == rig.value("sluice_store_errors_total") == 1


async def test_its_state_is_read(rig: Rig) -> None:
    assert rig.value("sluice_store_connected") == 1
    assert rig.value("sluice_store_outages_total") == rig.value("sluice_reservations_outstanding") == 0
    await rig.store.reserve("a", None, (Limit(Resource.CONCURRENT_REQUESTS, 1),), Ask(1, 1, 1))
    rig.store.is_connected, rig.store.num_outages = False, 2
    assert rig.value("sluice_store_connected") == 0
    assert rig.value("sluice_store_outages_total") == 2
    assert rig.value("sluice_reservations_outstanding") == 1
