"""Random runs of a whole core, as many as CI has time for; `scripts/prove_core.py` does a hundred thousand of each."""

from collections import Counter

from admission.core import CoreConfig
from admission.event_logs.event_log import replay
from tests.examples import examples
from tests.labs.core.log_runs import random_run
from tests.labs.core.random_runs import random_schedule


def test_the_service_of_backlogged_tenants_stays_within_the_bound_in_every_history() -> None:
    outcomes = [random_schedule(seed) for seed in range(examples(30, at_night=2000))]
    assert max(outcome.share for outcome in outcomes) <= 1
    assert max(outcome.share for outcome in outcomes) > 0.3, "a bound that is never approached proves little"
    assert sum(outcome.preemptions for outcome in outcomes) > 2.5 * len(outcomes)


def test_rows_without_numbers_lost_steps_and_clients_that_leave_are_decided_again_to_the_byte() -> None:
    config, kinds = CoreConfig(), Counter[str]()
    runs = examples(6, at_night=250)
    for seed in range(runs):
        engine = {"num_blocks": 16 + seed % 24, "steps_in_flight": 1 + seed % 2, "max_preemptions": 1 + seed % 4}
        lines = random_run(config, seed, losses=0.04, failures=0.1, **engine)
        entries = list(replay(lines))
        assert len(entries) == len(lines)
        kinds.update(entry[0] for entry in entries)
        kinds["without numbers"] += sum(entry[0] == "done" and bool(entry[6]) for entry in entries)
        kinds["preempted"] += sum(entry[0] == "plan" and bool(entry[6]) for entry in entries)
    assert min(kinds[kind] for kind in ("without numbers", "lost", "finish", "preempted")) > 2 * runs


def test_prefix_hits_evictions_and_losses_replay_to_the_byte() -> None:
    kinds, told = Counter[str](), Counter[str]()
    runs = examples(14, at_night=1200)
    for seed in range(runs):
        engine = {"num_blocks": 18 + seed % 30, "steps_in_flight": 1 + seed % 2, "max_preemptions": 1 + seed % 4}
        lines = random_run(CoreConfig(), seed, losses=0.06, failures=0.03, is_shared=True, **engine)
        entries = list(replay(lines))
        assert len(entries) == len(lines)
        kinds.update(entry[0] for entry in entries)
        kinds["preempted"] += sum(entry[0] == "plan" and bool(entry[6]) for entry in entries)
        told.update(f"{entry[0]} {what}" for entry in entries if isinstance(entry[-1], dict) for what in entry[-1])
    assert min(kinds[kind] for kind in ("lost", "finish", "preempted", "cache")) > 1.25 * runs
    assert min(told[what] for what in ("plan found", "plan evicted", "done blocks")) > 12.5 * runs
    assert min(told[what] for what in ("finish blocks", "plan blocks", "lost blocks")) > 0.375 * runs
