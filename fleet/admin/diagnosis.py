"""The router's diagnosis of its fleet, with the replicas' own diagnoses."""

import asyncio
from typing import Any

import httpx
import orjson

from fleet.admin.findings import Answers, FleetWindow, Look, fleet_findings
from fleet.admin.summary import summarized
from fleet.fleet import Fleet
from fleet.retries import RetryBudget
from fleet.view import ReplicaView
from gateway.doctor.finding import Finding
from gateway.doctor.snapshot import WINDOW_SECONDS

PATH = "/admin/v1/diagnosis"
ANSWER_SECONDS = 8.0  # for a replica's answer, the first of which takes 3; the doctor waits 10 for the router's
STALE_SECONDS = 60.0  # after which a look is too old to compare


class FleetDiagnosis:
    """Compares two looks at the fleet, `WINDOW_SECONDS` apart or more, and asks every replica meanwhile.

    The later look is kept for the next comparison, and its findings for calls within `WINDOW_SECONDS`.
    """

    def __init__(self, fleet: Fleet, budget: RetryBudget, client: httpx.AsyncClient, key: str) -> None:
        self._fleet, self._budget, self._client = fleet, budget, client
        self._headers = {"authorization": f"Bearer {key}"}
        self._lock = asyncio.Lock()
        self._last: Look | None = None
        self._found: list[Finding] = []

    async def report(self) -> dict[str, Any]:
        """Return the findings: with a recent report, once the replicas have answered, else after `WINDOW_SECONDS` at
        least.
        """
        async with self._lock:
            if self._last is None or self._fleet.clock() - self._last.at >= WINDOW_SECONDS:
                await self._diagnose()
        return {"findings": [finding.to_json() for finding in self._found]}

    async def _diagnose(self) -> None:
        before, answers = await asyncio.gather(self._before(), self._ask_all())
        after = self._look()
        self._found = fleet_findings(FleetWindow(before, after), answers)
        self._last = after

    async def _before(self) -> Look:
        """Return the last look if it is recent enough, else look and wait `WINDOW_SECONDS`."""
        if self._last is not None and self._fleet.clock() - self._last.at <= STALE_SECONDS:
            return self._last
        first = self._look()
        await asyncio.sleep(WINDOW_SECONDS)
        return first

    def _look(self) -> Look:
        fleet = self._fleet
        replicas = tuple(summarized(fleet, view) for view in fleet.views.values())
        return Look(fleet.clock(), replicas, len(fleet.available()), self._budget.is_left_for_all)

    async def _ask_all(self) -> Answers:
        """Ask all replicas at once, except lost ones, whose admin ports would not answer either."""
        views = [view for view in self._fleet.views.values() if view.state is not None]
        answers = await asyncio.gather(*map(self._ask, views))
        named = {view.name: answer for view, answer in zip(views, answers, strict=True)}
        return Answers(
            {name: answer for name, answer in named.items() if not isinstance(answer, str)},
            {name: answer for name, answer in named.items() if isinstance(answer, str)},
        )

    async def _ask(self, view: ReplicaView) -> list[Finding] | str:
        """The findings of one replica, or the reason why it gave none."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                reply = await self._client.get(f"{view.replica.admin}{PATH}", headers=self._headers)
            if reply.status_code != httpx.codes.OK:
                return f"its admin port answers {reply.status_code}"
            return [Finding.of(entry) for entry in orjson.loads(reply.content)["findings"]]
        except TimeoutError:
            return f"no answer within {ANSWER_SECONDS:g} s"
        except httpx.HTTPError as error:
            return str(error) or type(error).__name__
        except (KeyError, TypeError, ValueError) as error:
            return f"its answer is invalid ({type(error).__name__}: {error})"
