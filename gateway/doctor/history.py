"""Judges the last minutes of a running engine: how near its steps came to the device's roofline, and for whom.

A pure function of two sets of metrics, minutes apart."""

from collections.abc import Iterator
from typing import NamedTuple

from gateway.doctor.engine_findings import STEP
from gateway.doctor.finding import Finding
from gateway.doctor.snapshot import Window
from quotas.policy.units import show_wait

FAR_SHARE = 0.1  # of the roofline: rows more cost next to nothing there, and the time goes elsewhere
MIN_JUDGED_STEPS = 1000.0  # of which a share is told
UNEVEN_RATIO = 5.0  # of the 99th percentile over the median: what `sluice bench` doubts, too
MIN_UNEVEN_ANSWERS = 100.0  # below which a 99th percentile is the slowest of few
NOTICED_TOKEN_SECONDS = 0.1
WASTED_SHARE = 0.1  # of the computed tokens
WASTE = ("sluice_recomputed_tokens_total", "sluice_late_tokens_total", "sluice_padding_tokens_total")
FIRST_TOKEN, PER_TOKEN = (f"gen_ai_server_{name}_seconds" for name in ("time_to_first_token", "time_per_output_token"))


class Figure(NamedTuple):
    name: str
    value: str
    meaning: str


def figures(window: Window) -> Iterator[Figure]:
    """Yield the figures of the time between two sets of metrics."""
    steps, busy = window.count(STEP), window.increase("sluice_device_busy_seconds_total")
    took = f"in {show_wait(window.seconds)}; the device was busy for {busy / window.seconds:.0%}"
    yield Figure("steps", f"{steps:,.0f}", took)
    if not steps or not busy:
        return
    if floor := window.increase("sluice_device_floor_seconds_total"):
        yield Figure("of the roofline", f"{floor / busy:.0%}", "least time of these steps over the time that they took")
    yield Figure("tokens a step", f"{_tokens(window) / steps:,.1f}", "for which the weights are read once")
    mixed = {phase: window.increase("sluice_mixed_steps_seconds_total", phase=phase) for phase in ("prefill", "decode")}
    if both := sum(mixed.values()):
        of_all = f"of their time, {both / busy:.0%} of all"
        yield Figure("prompts in mixed steps", f"{mixed['prefill'] / both:.0%}", of_all)
    for name, histogram in (("first token", FIRST_TOKEN), ("time per token", PER_TOKEN)):
        if median := window.quantile(0.5, histogram):
            p99 = window.quantile(0.99, histogram)
            yield Figure(name, show_wait(median), f"median; p99 {show_wait(p99)}, {p99 / median:.1f} times as long")
    recomputed, late, padding = (window.increase(name) / max(1.0, _computed(window)) for name in WASTE)
    parts = f"recomputed {recomputed:.1%}, late {late:.1%}, padding {padding:.1%}"
    yield Figure("wasted tokens", f"{recomputed + late + padding:.1%}", parts)
    first = {"token": "first"}
    kept, missed = (window.count("sluice_estimate_error_seconds", **first, side=side) for side in ("early", "late"))
    if kept + missed:
        of_all = f"of {kept + missed:,.0f} first tokens; 90% by design"
        yield Figure("promises kept", f"{kept / (kept + missed):.0%}", of_all)


def far_from_roofline(window: Window) -> Finding | None:
    floor, busy = (window.increase(f"sluice_device_{name}_seconds_total") for name in ("floor", "busy"))
    if not floor or window.count(STEP) < MIN_JUDGED_STEPS or floor >= FAR_SHARE * busy:
        return None
    return Finding(
        "far_from_roofline",
        "steps take far longer than what they read and multiply",
        f"their floor is {floor / busy:.0%} of their time; {_tokens(window) / window.count(STEP):,.1f} tokens a step",
        "a small model's steps are launches, not reading: larger batches are nearly free. Of a large one: see that it "
        "is compiled (`sluice doctor`), and that nothing else uses the device or its cores",
    )


def uneven_answers(window: Window) -> Finding | None:
    median, p99 = (window.quantile(share, PER_TOKEN) for share in (0.5, 0.99))
    if window.count(PER_TOKEN) < MIN_UNEVEN_ANSWERS or p99 < max(NOTICED_TOKEN_SECONDS, UNEVEN_RATIO * median):
        return None
    return Finding(
        "uneven_answers",
        "some answers come far slower than most",
        f"p99 of the time per token is {show_wait(p99)}, its median {show_wait(median)}",
        "lower --prefill-chunk, or give the class of the slow ones a time_per_output_token; see preemptions",
    )


def wasted_work(window: Window) -> Finding | None:
    wasted = sum(map(window.increase, WASTE))
    if window.count(STEP) < MIN_JUDGED_STEPS or wasted < WASTED_SHARE * _computed(window):
        return None
    return Finding(
        "wasted_work",
        "much of what the device computes is thrown away",
        f"{wasted:,.0f} of {_computed(window):,.0f} tokens were recomputed, late or padding",
        "recomputed: lower --max-num-seqs or give KV memory more; late: answers of a few tokens have two in vain; "
        "padding: leave --batching continuous",
    )


def _tokens(window: Window) -> float:
    return window.increase("sluice_prefill_tokens_total") + window.increase("sluice_decode_tokens_total")


def _computed(window: Window) -> float:
    return _tokens(window) + window.increase("sluice_padding_tokens_total")
