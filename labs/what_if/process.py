"""The process that answers a gateway's `WhatIfQuestion`: it reads pickles from its standard input, and writes JSON."""

import pickle
import sys
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from statistics import median_low
from typing import Any

import orjson

from gateway.admin.recent_traffic import MAX_PROMPTS, RecentRequest, WhatIfQuestion
from labs.simulation.arrival import Arrival
from labs.simulation.device import Served, device_of
from labs.simulation.recording import TraceFacts
from labs.simulation.summary import ClassSummary, Summary, Tail, TenantSummary
from labs.simulation.traces import Traffic
from labs.what_if.comparison import MOST_REQUESTS, WhatIf, what_if
from quotas.policy.policy import Policy
from quotas.policy.policy_file import PolicyError, field_places, parse_policy

MAX_COMPUTE_SECONDS = 10.0  # of computation
PRIOR_STEPS = 200.0  # weight of the learned step times
MAX_ROWS = 100
MAX_CHANGES = 500

Row = dict[str, Any]


def main() -> None:
    read = partial(pickle.load, sys.stdin.buffer)  # written by the gateway that started this process
    question: WhatIfQuestion = read()
    requests: list[RecentRequest] = [request for _ in range(read()) for request in read()]
    sys.stdout.buffer.write(orjson.dumps(answer_of(question, requests)))


def answer_of(question: WhatIfQuestion, requests: list[RecentRequest]) -> Row | None:
    """Simulate the edit; None: it is not valid."""
    sources = question.edited
    if isinstance(sources, Policy):
        edited, places = sources, {}
    else:
        try:
            edited, places = parse_policy(sources), field_places(sources)
        except PolicyError:
            return None
    served = Served(question.core, question.engine, (question.step_time, PRIOR_STEPS))
    device = device_of("this one", question.step_time, served, question.block_bytes)
    facts = TraceFacts(True, True, True, question.model, question.began)
    traffic = Traffic(arrivals_of(requests), device, facts)
    return _report(what_if(traffic, question.policy, edited, places, most_seconds=MAX_COMPUTE_SECONDS), question.span)


def arrivals_of(requests: list[RecentRequest]) -> list[Arrival]:
    """Requests as arrivals of a simulation, in the same order, the first at 0 s.

    A cut answer is assumed to be as long as declared, or else as the median of its tenant's answers.
    """
    usual = _usual_lengths(requests)
    return [
        _arrival(number, request, request.at - requests[0].at, usual.get(request.asked.tenant))
        for number, request in enumerate(requests)
    ]


def _usual_lengths(requests: list[RecentRequest]) -> dict[str, int]:
    lengths: defaultdict[str, list[int]] = defaultdict(list)
    for request in requests:
        lengths[request.asked.tenant] += [length for length in request.lengths if length is not None]
    return {tenant: median_low(found) for tenant, found in lengths.items() if found}


def _arrival(number: int, request: RecentRequest, time: float, usual: int | None) -> Arrival:
    asked = request.asked
    known = [*request.lengths, *[None] * len(asked.prompts)]
    prompts = [
        (
            prompt.prompt_tokens,
            length or (prompt.most if prompt.is_declared or usual is None else min(prompt.most, usual)),
            prompt.most,
        )
        for prompt, length in zip(asked.prompts[:MAX_PROMPTS], known, strict=False)
    ]
    return Arrival(
        time,
        *prompts[0][:2],
        session=number,
        tenant=asked.tenant,
        max_tokens=prompts[0][2],
        deadline=asked.first_token,
        done_within=asked.last_token,
        interval=asked.interval,
        key=asked.key,
        service_tier=asked.service_tier,
        is_declared=asked.prompts[0].is_declared,
        body_bytes=asked.body_bytes,
        refused_by=asked.refusal,
        more_prompts=tuple(prompts[1:]),
        num_answers=asked.num_answers,
    )


def _report(result: WhatIf, span: float) -> Row:
    return {
        "requests": result.num_requests,
        "left_out": result.num_left_out,
        "most_requests": MOST_REQUESTS,
        "span": span,
        "changes": result.changes[:MAX_CHANGES],
        "not_simulated": result.not_simulated,
        "assumed": result.assumed,
        "before": _figures(result.before),
        "after": _figures(result.after),
        "classes": _pairs(result.before.classes, result.after.classes),
        "tenants": _pairs(result.before.tenants, result.after.tenants),
    }


def _figures(summary: Summary) -> Row:
    return {
        "completed": summary.completed,
        "refused": sum(summary.refusals.values()),
        "refusals": summary.refusals,
        "goodput": summary.goodput,
        "busy": summary.busy,
        "preemptions": summary.preemptions,
        "first_token": _tail(summary.first_token),
        "per_token": _tail(summary.per_token),
        "spend": summary.spend,
    }


def _pairs(before: Iterable[TenantSummary | ClassSummary], after: Iterable[TenantSummary | ClassSummary]) -> list[Row]:
    """Rows of both runs by name, differing ones first, at most `MAX_ROWS`."""
    old, new = ({one.name: _of_one(one) for one in some} for some in (before, after))
    rows = [{"name": name, "before": old.get(name), "after": new.get(name)} for name in {**old, **new}]
    return sorted(rows, key=lambda row: row["before"] == row["after"])[:MAX_ROWS]


def _of_one(one: TenantSummary | ClassSummary) -> Row:
    tail = _tail(one.first_token)
    return {"completed": one.completed, "refused": one.refused, "goodput": one.goodput, "first_token": tail}


def _tail(tail: Tail) -> Row:
    return {"p50": tail.p50, "p99": tail.p99}


if __name__ == "__main__":
    main()
