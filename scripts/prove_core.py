"""Drives the scheduling core through far more random runs than CI has time for, and holds it to its invariants.

    python -m scripts.prove_core [--schedules 100000] [--examples 5000] [--jobs 1]

Prints what was run and how near it came to the bounds; exits with 1 at the first violation, naming its seed. About
fifteen minutes on one core.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TypeVar

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from labs.process_pool import process_pool
from tests.labs.core.core_machine import CoreMachine
from tests.labs.core.random_runs import random_schedule

SEEDS_PER_CHUNK = 200  # seeds a process takes at a time

T = TypeVar("T")


class Violation(Exception):
    """A violated invariant, and its seed."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    what: str
    runs: str
    seconds: float
    found: str


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=100_000, help="against the fairness bound")
    parser.add_argument("--examples", type=int, default=5_000, help="of the state machine")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    first = options.first_seed
    schedules = range(first, first + options.schedules)
    print(f"{'what':38}{'runs':>26}{'seconds':>9}  found")
    try:
        with process_pool(options.jobs) as pool:
            show(prove_fairness(pool, schedules))
        show(prove_machine(options.examples))
    except (Violation, AssertionError) as violation:
        sys.exit(f"violated: {violation}")


def show(row: Row) -> None:
    print(f"{row.what:38}{row.runs:>26}{row.seconds:>9.0f}  {row.found}", flush=True)


def prove_fairness(pool: ProcessPoolExecutor, seeds: range) -> Row:
    start = perf_counter()
    largest, preemptions, over_half = 0.0, 0, 0
    for fairness in spread(pool, random_schedule, seeds):
        largest = max(largest, fairness.share)
        preemptions += fairness.preemptions
        over_half += fairness.share > 0.5
    found = f"largest gap {largest:.3f} of its bound; {over_half} above a half; {preemptions:,} preemptions"
    return Row("fairness bound", f"{len(seeds):,} schedules", perf_counter() - start, found)


def prove_machine(examples: int) -> Row:
    start = perf_counter()
    run_state_machine_as_test(
        CoreMachine, settings=settings(max_examples=examples, stateful_step_count=40, deadline=None, database=None)
    )
    return Row("state machine, all invariants", f"{examples:,} examples", perf_counter() - start, "none violated")


def spread(pool: ProcessPoolExecutor, run: Callable[[int], T], seeds: range) -> Iterable[T]:
    """The outcomes, in the order of the seeds. Raises `Violation`."""
    return pool.map(partial(_named, run), seeds, chunksize=SEEDS_PER_CHUNK)


def _named(run: Callable[[int], T], seed: int) -> T:
    try:
        return run(seed)
    except AssertionError as error:
        raise Violation(f"seed {seed}: {error}") from error


if __name__ == "__main__":
    main()
