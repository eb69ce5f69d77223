"""Simulates a pasted edit of the policy on the last hour's requests, in a process beside the gateway.

The process is an extension's (`labs`): it simulates the recorded requests under both policies, in its own time.
"""

import logging
import pickle
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import orjson

from admission.core import CoreConfig
from backend.extensions import extensions
from gateway.admin.recent_traffic import RecentRequest, RecentTraffic, WhatIfQuestion
from gateway.admin.side_process import SideProcess, SideProcessFailed
from gateway.api.service import Service
from gateway.errors import BadRequest, InternalError
from quotas.policy.policy import Policy

log = logging.getLogger(__name__)

REQUESTS_PER_TURN = 200

Row = dict[str, Any]


class WhatIfs:
    """Simulates pasted policies, one at a time."""

    def __init__(self, service: Service, config: CoreConfig, traffic: RecentTraffic) -> None:
        self._service = service
        self._config = config
        self._traffic = traffic
        self._process = SideProcess("simulation")

    async def of(self, edited: Mapping[str, bytes] | Policy, base: Policy | None = None) -> Row:
        """Simulate an edited policy, or its files, and report the differences to `base`; None: the policy in force.

        Raises `BadRequest` for an invalid policy, without recorded requests, and without the extension; and as
        `SideProcess` does.
        """
        program = next((extension.WHAT_IF for extension in extensions() if hasattr(extension, "WHAT_IF")), None)
        if program is None:
            raise BadRequest("Simulating an edit needs the package labs, part of a source checkout.")
        now = self._service.telemetry.clock()
        requests = self._traffic.within(now)
        if not requests:
            raise BadRequest("No request came in the last hour: there is nothing to simulate.")
        question = self._question(now - requests[0].at, edited, base or self._service.policies.current)
        try:
            told = await self._process.answer(program, question=partial(_packed, requests, question))
        except SideProcessFailed as error:
            log.error("a simulation failed: %s", error)
            raise InternalError("The simulation failed. It has been logged.") from None
        answer: Row | None = orjson.loads(told)
        if answer is None:
            raise BadRequest("The edit is not valid: check it first.", "text")
        return answer

    def _question(self, span: float, edited: Mapping[str, bytes] | Policy, base: Policy) -> WhatIfQuestion:
        core, service = self._service.core, self._service
        return WhatIfQuestion(
            core=self._config,
            engine=core.scheduler.config,
            step_time=core.step_time.fitted,
            block_bytes=service.kv_shape.block_bytes,
            model=service.model,
            began=time.time() - span,
            span=span,
            policy=base,
            edited=edited,
        )


def _packed(requests: list[RecentRequest], question: WhatIfQuestion) -> bytes:
    """Pickle the question in pieces, because pickling all of it at once would hold the interpreter's lock."""
    pieces = [requests[start : start + REQUESTS_PER_TURN] for start in range(0, len(requests), REQUESTS_PER_TURN)]
    return b"".join([pickle.dumps(question), pickle.dumps(len(pieces)), *map(pickle.dumps, pieces)])
