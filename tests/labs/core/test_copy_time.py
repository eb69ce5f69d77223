"""What copies add to steps, and that steps which have many of them still keep the time between tokens."""

import pytest

from admission.step_times.step_time import CopyTime, Pipeline
from backend.config import EngineConfig
from backend.scheduler.batch import Counters
from labs.simulation.arrival import Arrival, ClassTarget
from labs.simulation.contents import Content
from labs.simulation.loop import Loop
from labs.simulation.policy import parse_simulated_policy
from labs.simulation.recorder import Objective, Recorder
from tests.labs.simulation.runs import DEVICE

EACH = 0.5
BLOCK_BYTES = 2**21
INTERVAL = 0.05
UNIT = 512


def copy_time(pipeline: Pipeline, runs_ahead: bool = True) -> CopyTime:
    config = EngineConfig(num_blocks=10, max_model_len=32, block_copy_seconds=EACH, copies_run_ahead=runs_ahead)
    return CopyTime(config, pipeline)


def test_where_nothing_runs_ahead_copies_prolong_their_step() -> None:
    pipeline = Pipeline()
    pipeline.planned(10.0, 0.0)
    time = copy_time(pipeline, runs_ahead=False)
    time.set_time(0.0)
    assert time.planned(4) == 2.0 and time.seconds(0) == 0.0


def test_copies_run_beside_the_steps_in_flight_and_prolong_their_step_by_what_is_left() -> None:
    pipeline = Pipeline()
    time = copy_time(pipeline)
    pipeline.planned(3.0, 0.0)
    time.set_time(1.0)
    assert [time.seconds(copies) for copies in (0, 1, 4, 6)] == [0.0, 0.0, 0.0, 1.0]


def test_copies_wait_for_earlier_steps_copies() -> None:
    pipeline = Pipeline()
    time = copy_time(pipeline)
    time.set_time(0.0)
    assert time.planned(8) == 4.0, "nothing is in flight that they could run beside"
    pipeline.planned(5.0, 0.0)
    time.set_time(2.0)
    assert time.planned(4) == 1.0, "they begin at 4 and end at 6, and the step before ends at 5"
    time.lost()
    pipeline.lost()
    time.set_time(3.0)
    assert time.planned(1) == EACH


def returning(gigabytes: float, more: str) -> tuple[list[float], Counters]:
    """The times of all steps, while long answers are generated and prompts come back from the host."""
    living = [Arrival(0.01 * n, 64, 1100, tenant="live", content=Content((9000 + n,), UNIT, 64)) for n in range(8)]
    back = [
        Arrival(
            1 + 8 * turn + s, 3000, 8, tenant="chat", content=Content(tuple(range(100 * s, 100 * s + 6)), UNIT, 3000)
        )
        for turn in range(2)
        for s in range(8)
    ]
    copy = BLOCK_BYTES / (gigabytes * 1e9)
    settings = "fair,num_blocks=1100,max_model_len=4096,num_host_blocks=4000,swap=always"
    policy = parse_simulated_policy(f"{settings},block_copy_seconds={copy},{more}", DEVICE)
    core, times = policy.make_core(), list[float]()
    recorder = Recorder(DEVICE, Objective(), {})
    loop = Loop(core, DEVICE, recorder, 4096, target=lambda priority: ClassTarget(None, INTERVAL))
    account = core.update_from_output
    core.update_from_output = lambda output, now: (times.append(output.elapsed), account(output, now))[1]  # type: ignore[method-assign]
    loop.run(living + back)
    core.scheduler.check_integrity()
    return times, core.scheduler.counters


@pytest.mark.parametrize("gigabytes", [1, 3])
@pytest.mark.parametrize("ahead", ["on", "off"])
def test_over_a_slow_link_steps_with_copies_keep_the_time_between_tokens(gigabytes: float, ahead: str) -> None:
    """At 1 GB/s a prompt's blocks take 0.4 s; before copies counted, one step took all of it."""
    times, counters = returning(gigabytes, f"copies_run_ahead={ahead}")
    assert counters.swapped_in > 500 and counters.swapped_out > 500
    assert max(times) < 1.2 * INTERVAL
    assert sum(seconds > INTERVAL for seconds in times) < 0.02 * len(times)


def test_copies_that_run_ahead_cost_less() -> None:
    beside, within = (sum(returning(3, f"copies_run_ahead={ahead}")[0]) for ahead in ("on", "off"))
    assert beside < 0.97 * within
