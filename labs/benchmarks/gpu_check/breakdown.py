"""The kernels that take the time of a step, by torch's profiler."""

import re
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from backend.scheduler.batch import Batch
from backend.worker.model_runner import ModelRunner
from labs.benchmarks.gpu_check.finding import Finding

LONGEST = 10  # kernels that are told apart
LONGEST_PAUSE = 50.0  # microseconds


def breakdown(what: str, runner: ModelRunner, batches: list[Batch]) -> Iterator[Finding]:
    """Microseconds a step of the kernels that take the most, of the rest, and of all together."""
    on_device = runner.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_device else ProfilerActivity.CPU]) as profiler:
        for batch in batches:
            runner.launch(batch).wait()
    events = [(_seconds(event, on_device), event.count, _short(event.key)) for event in profiler.key_averages()]
    events.sort(reverse=True)
    if on_device:
        yield _finding(f"{what}: between kernels", _seconds_between(profiler), batches)
    for seconds, count, name in events[:LONGEST]:
        yield _finding(f"{what}: {name} x {count / len(batches):g}", seconds, batches)
    yield _finding(f"{what}: other kernels", sum(seconds for seconds, _, _ in events[LONGEST:]), batches)
    yield _finding(f"{what}: all kernels", sum(seconds for seconds, _, _ in events), batches)


def _seconds_between(profiler: profile) -> float:
    """Return the seconds in which the device pauses within steps; longer pauses are between steps, of which one runs at
    a time here.
    """
    spans = [event.time_range for event in profiler.events() if event.device_type == DeviceType.CUDA]
    spans.sort(key=lambda span: span.start)
    ends = accumulate((span.end for span in spans), max)
    pauses = (span.start - end for end, span in zip(ends, spans[1:], strict=False))
    return sum(pause for pause in pauses if 0 < pause < LONGEST_PAUSE) / 1e6


def _finding(what: str, seconds: float, batches: list[Batch]) -> Finding:
    return Finding(what, seconds / len(batches) * 1e6, "us a step")


def _seconds(event: Any, on_device: bool) -> float:
    return (event.self_device_time_total if on_device else event.self_cpu_time_total) / 1e6


def _short(name: str) -> str:
    """Without the arguments and namespaces that C++ spells out."""
    return re.sub(r"<.*|\(.*|^void |\w+::", "", name)[:40]
