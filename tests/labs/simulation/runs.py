from pathlib import Path

from admission.controller import Controller
from admission.core import PRIOR_STEP_TIME
from admission.event_logs.event_log import make_logged_core
from admission.step_times.step_time import StepTimeModel
from labs.simulation.arrival import Arrival
from labs.simulation.device import DEVICES, Device
from labs.simulation.loop import Loop
from labs.simulation.policy import parse_simulated_policy
from labs.simulation.recorder import Objective, Recorder
from labs.simulation.study import Results, Study
from labs.simulation.workload import Workload

DEVICE = DEVICES["llama3-8b-a100"]
TRACE = tuple(Arrival(n * 0.2, 50 + 37 * n % 400, 1 + 13 * n % 60, session=n) for n in range(120))


def simulated(policy: str, arrivals: list[Arrival]) -> tuple[Recorder, Controller, float]:
    simulated = parse_simulated_policy(policy, DEVICE)
    recorder = Recorder(DEVICE, Objective(), simulated.core.weights)
    core = simulated.make_core()
    return recorder, core, Loop(core, DEVICE, recorder, simulated.engine.max_model_len).run(arrivals)


def recorded(policy: str, arrivals: list[Arrival], device: Device = DEVICE) -> tuple[Recorder, list[str]]:
    """The same with an event log, whose lines are returned."""
    simulated, lines = parse_simulated_policy(policy, DEVICE), list[str]()
    core = make_logged_core(simulated.core, simulated.engine, StepTimeModel(PRIOR_STEP_TIME), lines.append)[0]
    recorder = Recorder(device, Objective(), {})
    Loop(core, device, recorder, simulated.engine.max_model_len).run(arrivals)
    return recorder, lines


def compared(*policies: str, tenants: str = "2", seeds: int = 2, jobs: int = 1) -> Results:
    workload = Workload(TRACE, speedup=4.0, tenants=tenants)
    study = Study(
        tuple(parse_simulated_policy(p, DEVICE) for p in policies), workload, DEVICE, Objective(), seeds, jobs
    )
    return study.run()


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
