"""Simulates what a pasted edit of the policy would have done to the last hour, in a process beside the gateway.

Run as a program, this module is that process: it reads a question from its standard input and writes the answer.
"""

import asyncio
import os
import pickle
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from admission.core import CoreConfig
from admission.simulation.device import Served, device_of
from admission.simulation.recording import TraceFacts
from admission.simulation.summary import ClassSummary, Summary, Tail, TenantSummary
from admission.simulation.traces import Traffic
from backend.own_process import module_command, module_environment
from gateway.admin.policy import NAME, PastedPolicy
from gateway.admin.recent_traffic import RecentRequest, RecentTraffic, arrivals_of
from gateway.api.service import Service
from gateway.errors import BadRequest, InternalError, Overloaded
from gateway.what_if.comparison import MOST_REQUESTS, WhatIf, what_if
from quotas.policy.policy_file import PolicyError, field_places, parse_policy

MOST_SECONDS = 10.0  # of computing
PATIENCE = 60.0  # seconds until the process, which has to start and read as well, is ended
NICENESS = 19  # what serves goes first
PIECE = 200  # requests
PRIOR_STEPS = 200.0  # that the learned step times count as
MAX_ROWS = 100

Row = dict[str, Any]


class WhatIfs:
    """Runs simulations of pasted policies, one at a time."""

    def __init__(self, service: Service, config: CoreConfig, traffic: RecentTraffic) -> None:
        self._service = service
        self._config = config
        self._traffic = traffic
        self._is_busy = False

    async def of(self, pasted: PastedPolicy) -> Row:
        """Simulate an edit and report what differs.

        Raises `BadRequest` for what is no policy and where nothing was served, `Overloaded` while another runs.
        """
        if self._is_busy:
            raise Overloaded("Another simulation is running here: one runs at a time.", retry_after=5.0)
        self._is_busy = True
        try:
            return await self._of(pasted)
        finally:
            self._is_busy = False

    async def _of(self, pasted: PastedPolicy) -> Row:
        source = pasted.source()
        now = self._service.telemetry.clock()
        requests = self._traffic.within(now)
        if not requests:
            raise BadRequest("No request came in the last hour: there is nothing to simulate.")
        span = now - requests[0].at
        facts = TraceFacts(True, True, True, self._service.model, time.time() - span)
        device = device_of("this one", *self._step_time(), self._service.kv_shape.block_bytes)
        before = self._service.policies.current
        answer = await _asked(await asyncio.to_thread(_packed, requests, (device, facts, before, source)))
        if answer is None:
            raise BadRequest("The edit is not valid: check it first.", "text")
        return _report(answer, span)

    def _step_time(self) -> tuple[Any, Served]:
        core = self._service.core
        fitted = core.step_time.fitted
        lengths = core.predictor.learned if core.predictor is not None else None
        return fitted, Served(self._config, core.scheduler.config, (fitted, PRIOR_STEPS), lengths=lengths)


def _packed(requests: list[RecentRequest], rest: object) -> bytes:
    """Pickle the question in pieces, because pickling all of it at once would hold the interpreter's lock."""
    arrivals = arrivals_of(requests)
    pieces = [arrivals[start : start + PIECE] for start in range(0, len(arrivals), PIECE)]
    return b"".join([pickle.dumps(len(pieces)), *map(pickle.dumps, pieces), pickle.dumps(rest)])


async def _asked(question: bytes) -> WhatIf | None:
    """Return what the other process answers; None means that the edit is not valid. Raises `InternalError`."""
    process = await asyncio.create_subprocess_exec(
        *module_command("gateway.admin.what_if"),
        env=module_environment(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(PATIENCE):
            answer, _ = await process.communicate(question)
    except TimeoutError:
        raise InternalError(f"The simulation took more than {PATIENCE:g} s, and was ended.") from None
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise InternalError("The simulation failed. It has been logged.")
    result: WhatIf | None = pickle.loads(answer)  # noqa: S301 - written by this program
    return result


def _report(result: WhatIf, span: float) -> Row:
    """Describe a result; `span` is the seconds since the first of the requests."""
    return {
        "requests": result.num_requests,
        "left_out": result.num_left_out,
        "most_requests": MOST_REQUESTS,
        "span": span,
        "changes": result.changes[:500],
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
    """Return rows of both runs by name, those that differ first, at most `MAX_ROWS`."""
    old, new = ({one.name: _of_one(one) for one in some} for some in (before, after))
    rows = [{"name": name, "before": old.get(name), "after": new.get(name)} for name in {**old, **new}]
    return sorted(rows, key=lambda row: row["before"] == row["after"])[:MAX_ROWS]


def _of_one(one: TenantSummary | ClassSummary) -> Row:
    tail = _tail(one.first_token)
    return {"completed": one.completed, "refused": one.refused, "goodput": one.goodput, "first_token": tail}


def _tail(tail: Tail) -> Row:
    return {"p50": tail.p50, "p99": tail.p99}


def _main() -> None:
    os.nice(NICENESS)
    read = partial(pickle.load, sys.stdin.buffer)  # written by the gateway that started this process
    arrivals = [arrival for _ in range(read()) for arrival in read()]
    device, facts, before, source = read()
    answer = None
    with suppress(PolicyError):
        edited, places = parse_policy({NAME: source}), field_places({NAME: source})
        answer = what_if(Traffic(arrivals, device, facts), before, edited, places, most_seconds=MOST_SECONDS)
    sys.stdout.buffer.write(pickle.dumps(answer))


if __name__ == "__main__":
    _main()
