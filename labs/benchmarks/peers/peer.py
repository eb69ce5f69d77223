"""A peer is a measured engine: a process that generates workloads when asked, one JSON line each way."""

import json
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from labs.benchmarks.workload import Workload

MAX_NUM_SEQS = 32
CPU_RATE = "tok/CPU-s"  # tokens a second of the engine's CPU time, which others on the machine change little


@dataclass(slots=True)
class Generated:
    """One workload's run. `times` holds the arrival of each token of each request, in seconds from the start.

    `cached_tokens` are those of prompts that were found in a cache, as the engine counts them; 0 of one that has none.
    `cpu_seconds` are those of the engine's process; None: it is the process that was asked.
    """

    seconds: float
    times: list[list[float]]
    cached_tokens: int
    cpu_seconds: float | None = None
    extra: dict[str, float] = field(default_factory=dict)


Generate = Callable[[Workload], Generated]


def parser() -> ArgumentParser:
    made = ArgumentParser()
    made.add_argument("--model", required=True, help="directory in Hugging Face layout")
    made.add_argument("--dtype", required=True, choices=("float32", "bfloat16"))
    made.add_argument("--max-num-seqs", type=int, default=MAX_NUM_SEQS)
    return made


def answer_requests(options: Namespace, load: Callable[[Namespace], AbstractContextManager[Generate]]) -> None:
    """Load the engine, say so, then generate what is asked for. All other output goes to standard error."""
    with _answers() as answer, load(options) as generate:
        answer({"ready": True})
        for line in sys.stdin:
            workload = Workload(**json.loads(line))
            began = time.process_time()
            done = generate(workload)
            cpu_seconds = time.process_time() - began if done.cpu_seconds is None else done.cpu_seconds
            counts = [len(times) for times in done.times]
            assert counts == workload.max_tokens, f"{counts} tokens came, {workload.max_tokens} were asked for"
            assert not done.cached_tokens, f"{done.cached_tokens} tokens of prompts were found in a cache"
            extra = {CPU_RATE: workload.num_output_tokens / cpu_seconds} | done.extra
            answer({"seconds": done.seconds, "times": done.times, "extra": extra})


@contextmanager
def _answers() -> Any:
    """Standard output for answers alone: libraries that print, and their children, get standard error instead."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)

        def answer(message: dict[str, Any]) -> None:
            out.write(json.dumps(message) + "\n")
            out.flush()

        yield answer
