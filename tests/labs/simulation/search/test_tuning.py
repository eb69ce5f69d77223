from dataclasses import replace

import pytest

from labs.process_pool import process_pool
from labs.simulation.arrival import Arrival
from labs.simulation.policy import SimulatedPolicy, parse_simulated_policy
from labs.simulation.recorder import Objective
from labs.simulation.search import tuning
from labs.simulation.search.tuning import Tuner
from tests.labs.simulation.runs import DEVICE

ARRIVALS = [Arrival(n * 0.12, 300 + 37 * n % 900, 5 + 13 * n % 90, session=n, tenant="ab"[n % 2]) for n in range(60)]
CRAMPED = parse_simulated_policy("fair,max_num_seqs=4,max_num_batched_tokens=256,prefill_chunk=64", DEVICE)


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    ladders = {
        "max_num_seqs": (4, 16, 64),
        "max_num_batched_tokens": (256, 1024),
        "prefill_chunk": (64, 256),
    }
    monkeypatch.setattr(tuning, "LADDERS", ladders)
    monkeypatch.setattr(tuning, "MIN_PART_REQUESTS", 10)


def tuner(policy: SimulatedPolicy = CRAMPED, budget: float = 12) -> Tuner:
    return Tuner(policy, ARRIVALS, DEVICE, Objective(1.0, 0.05), budget)


@pytest.mark.nightly
def test_tuning_finds_a_setting_near_the_best_of_all() -> None:
    search = tuner()
    tuned = search.run()
    best = search.best_of(search.grid())
    assert tuned.present.setting == (4, 256, 64) and tuned.gain > 0.2
    assert tuned.best.summary.goodput >= 0.97 * best.summary.goodput
    assert tuned.gain == pytest.approx(tuned.best.summary.goodput - tuned.present.summary.goodput)


def test_a_search_costs_no_more_than_its_budget_and_is_the_same_in_other_processes() -> None:
    once = tuner(budget=6).run()
    assert once.spent <= 6.5
    with process_pool(2) as pool:
        side_by_side = tuner(budget=6)
        side_by_side.executor = pool
        assert side_by_side.run() == once


def test_settings_that_no_engine_can_have_are_not_tried() -> None:
    grid = tuner(replace(CRAMPED, engine=replace(CRAMPED.engine, max_num_seqs=256))).grid()
    assert (256, 256, 64) in grid and len(grid) == 4 * 2 * 2
    wide = replace(CRAMPED, engine=replace(CRAMPED.engine, max_num_batched_tokens=4096, max_num_seqs=512))
    assert (512, 256, 64) not in tuner(wide).grid()
