"""Records the event logs of tests/labs/core/recorded, which the test beside them replays to the byte.

    python -m scripts.record_logs [NAME ...]

They hold the core's decisions when they were recorded, and show a change of its decisions to the author. This writes
logs that are missing, or of another version than the present one, and touches no other. So a change
that is meant to decide or to write otherwise deletes them first, and its commit says what they decide otherwise; a
change that is not meant to is what they are there to find. Once a release has written logs, one that reads them
otherwise raises the version too.
"""

from __future__ import annotations

import gzip
import json
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from functools import partial
from pathlib import Path

from admission.core import CoreConfig, MemoryGate, Overload
from admission.event_logs.event_log import VERSION, replay
from admission.kv.retention import BetweenTurnsRule
from admission.kv.swap_choice import SwapRule
from backend.config import Batching, KVAllocation
from tests.gateway.served_log import served
from tests.labs.core import log_scenes
from tests.labs.core.log_runs import flood, many_answers, random_run

FOLDER = Path(__file__).parent.parent / "tests" / "labs" / "core" / "recorded"
Record = Callable[[], list[str]]

BOUNDED = CoreConfig(
    seconds_per_class=0.1,
    memory=MemoryGate.MINIMUM_FREE,
    min_free_blocks=4,
    prefill_share=0.5,
    overload=Overload.BOUNDED,
    max_waiting=12,
    max_waiting_tokens=160,
    max_waiting_bytes=1600,
    max_waiting_seconds=0.2,
    tenant_max_waiting=5,
    tenant_max_waiting_tokens=90,
    tenant_max_waiting_bytes=900,
    tenant_max_waiting_seconds=0.1,
)
CROWDED = CoreConfig(
    burst_s=2.0,
    memory=MemoryGate.OPTIMISTIC,
    overload=Overload.UNBOUNDED,
    max_waiting=None,
)
FCFS = CoreConfig(order="fcfs", memory=MemoryGate.OPTIMISTIC, overload=Overload.BOUNDED, max_waiting=6)
PREDICTED = CoreConfig(order="response_ratio")
VTC = CoreConfig(order="vtc", weights={"acme": 3.0})
STATIC, PADDED = {"batching": Batching.STATIC}, {"batching": Batching.STATIC_PADDED}
CONTIGUOUS = {"kv_allocation": KVAllocation.CONTIGUOUS}

SCENES: dict[str, Record] = {
    "refusals": log_scenes.refusals,
    "shared_bounds": log_scenes.shared_bounds,
    "tenant_bounds": log_scenes.tenant_bounds,
    "preemptions": log_scenes.preemptions,
    "past_bound": log_scenes.past_bound,
    "leases": log_scenes.leases,
    "leases_of_many": log_scenes.leases_of_many,
    "extensions": log_scenes.extensions,
    "paused_in_the_way": log_scenes.paused_in_the_way,
    "losses": log_scenes.losses,
    "answers": log_scenes.answers,
    "cancels": log_scenes.cancels,
    "failures": log_scenes.failures,
    "jumps": log_scenes.jumps,
    "drafts": log_scenes.drafts,
    "debts": log_scenes.debts,
    "give_ups": log_scenes.give_ups,
    "controlled_delay": log_scenes.controlled_delay,
    "requests": log_scenes.requests,
    "calibration": log_scenes.calibration,
    "spare": log_scenes.spare,
}
RUNS: dict[str, Record] = {
    "fair": partial(random_run, CoreConfig(weights={"acme": 2.0, "beta": 0.5}), 1, learned=True, num_blocks=24),
    "fair_tokens": partial(random_run, BOUNDED, 2, losses=0.02, steps_in_flight=1),
    "fair_crowded": partial(random_run, CROWDED, 3, num_blocks=16, max_preemptions=1),
    "fcfs": partial(random_run, FCFS, 4, num_blocks=20),
    "round_robin": partial(
        random_run,
        CoreConfig(order="round_robin", confidence=0.8),
        5,
        batching=Batching.WINDOW,
        preferred_batch_sizes=(2, 4),
        max_batch_delay=0.02,
    ),
    "shortest_first": partial(
        random_run,
        CoreConfig(order="shortest_first", memory=MemoryGate.MINIMUM_FREE),
        6,
        batching=Batching.PREFILL_FIRST,
    ),
    "vtc": partial(random_run, VTC, 7, num_blocks=20),
    "virtual_finish": partial(
        random_run,
        CoreConfig(order="virtual_finish", weights={"corp": 3.0}),
        8,
        batching=Batching.MULTILEVEL_FEEDBACK,
    ),
    "earliest_deadline": partial(
        random_run,
        CoreConfig(order="earliest_deadline", seconds_per_class=0.5),
        9,
        batching=Batching.NESTED_WAIT,
    ),
    "adaptive_lifo": partial(
        random_run,
        CoreConfig(order="adaptive_lifo", overload=Overload.CONTROLLED_DELAY),
        10,
        steps_in_flight=1,
        batching=Batching.WAIT,
    ),
    "learned_rank": partial(random_run, CoreConfig(order="learned_rank"), 22, rounds=25),
    "length_groups": partial(random_run, CoreConfig(order="length_groups"), 23, rounds=25, **PADDED),
    "least_laxity": partial(random_run, CoreConfig(order="least_laxity"), 24, rounds=25, batching=Batching.SLAI),
    "response_ratio": partial(random_run, PREDICTED, 25, rounds=25),
    "magnus": partial(random_run, CoreConfig(order="magnus"), 26, rounds=25, **PADDED),
    "static": partial(random_run, FCFS, 11, prefill_chunk=None, max_num_batched_tokens=64, **STATIC),
    "contiguous": partial(random_run, CoreConfig(), 12, **CONTIGUOUS),
    "static_contiguous": partial(random_run, CoreConfig(overload=Overload.UNBOUNDED), 13, **STATIC, **CONTIGUOUS),
    "failing": partial(random_run, CoreConfig(), 14, losses=0.03, failures=0.1, num_blocks=20),
    "sharing": partial(
        random_run, CoreConfig(), 28, losses=0.08, failures=0.03, rounds=110, is_shared=True, num_blocks=26
    ),
    "swap_always": partial(
        random_run,
        CoreConfig(swap=SwapRule.ALWAYS),
        21,
        losses=0.03,
        rounds=40,
        is_shared=True,
        num_blocks=26,
        num_host_blocks=20,
        block_copy_seconds=2e-3,
        copies_run_ahead=True,
    ),
    "swap_never": partial(
        random_run,
        CoreConfig(swap=SwapRule.NEVER, between_turns=BetweenTurnsRule.LRU),
        21,
        rounds=45,
        is_shared=True,
        num_blocks=26,
        num_host_blocks=30,
    ),
    "swapping": partial(
        random_run,
        CoreConfig(),
        16,
        losses=0.05,
        rounds=38,
        is_shared=True,
        num_blocks=24,
        num_host_blocks=40,
        block_copy_seconds=1e-5,
    ),
    "cache_off": partial(
        random_run, CoreConfig(memory_risk=1.28, calibration=False), 15, rounds=50, is_shared=True, prefix_cache=False
    ),
    "many_answers": many_answers,
    "flood": flood,
}
LOGS: dict[str, Record] = SCENES | RUNS | {"served": served}


def main() -> None:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", metavar="NAME", nargs="*", help=f"of the logs, or all: {', '.join(LOGS)}")
    names = parser.parse_args().names or list(LOGS)
    if unknown := [name for name in names if name not in LOGS]:
        parser.error(f"there is no log {unknown[0]}: they are {', '.join(LOGS)}")
    for name in names:
        record(name)


def record(name: str, folder: Path = FOLDER) -> None:
    """Record a log, unless the folder has one of this version."""
    path = folder / f"{name}.log.gz"
    if path.exists() and json.loads(read(path)[0])[1] == VERSION:
        print(f"{name}: there is a log of version {VERSION}, which is kept", file=sys.stderr)
        return
    lines = LOGS[name]()
    assert len(list(replay(lines))) == len(lines)
    write(path, lines)
    print(f"{name}: {len(lines)} entries, {path.stat().st_size} bytes")


def read(path: Path) -> list[str]:
    """Returns the lines of a log."""
    return gzip.decompress(path.read_bytes()).decode().splitlines()


def write(path: Path, lines: list[str]) -> None:
    """Write a log, as the same bytes for the same lines."""
    path.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0))


if __name__ == "__main__":
    main()
