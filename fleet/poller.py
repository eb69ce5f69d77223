"""Polls the replicas' states, as long as the router runs."""

import asyncio
import logging
from functools import partial

import httpx

from fleet.fleet import LEARNED_AT_ONCE, Fleet
from fleet.view import SILENCE_SECONDS, ReplicaView
from gateway.replica.state import StateError, parse_state

log = logging.getLogger(__name__)

PATH = "/admin/v1/state"


class Poller:
    """Polls each replica every `interval` seconds, or after its last answer if that is later."""

    def __init__(self, fleet: Fleet, client: httpx.AsyncClient, key: str, interval: float) -> None:
        self._fleet, self._client, self._interval = fleet, client, interval
        self._headers = {"authorization": f"Bearer {key}"}
        self._asking: dict[ReplicaView, asyncio.Task[None]] = {}

    async def run(self) -> None:
        try:
            while True:
                for view in self._fleet.views.values():
                    if view not in self._asking:
                        task = self._asking[view] = asyncio.create_task(self._ask(view))
                        task.add_done_callback(partial(self._asked, view))
                await asyncio.sleep(self._interval)
        finally:
            asking = [*self._asking.values()]
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    async def _ask(self, view: ReplicaView) -> None:
        asked = self._fleet.clock()
        try:
            reply = await self._client.get(
                f"{view.replica.admin}{PATH}?since={view.next_event}",
                headers=self._headers,
                timeout=httpx.Timeout(SILENCE_SECONDS),
            )
            if reply.status_code != httpx.codes.OK:
                raise StateError(f"its admin port answers {reply.status_code}: {reply.text[:200]}")
            state = parse_state(reply.content)
            self._fleet.told(view, state, asked)
            for first in range(LEARNED_AT_ONCE, len(state.beginnings.cached), LEARNED_AT_ONCE):
                await asyncio.sleep(0)  # the loop's others: after its start a replica is told of 20,000
                if view.state is state:  # else it was lost meanwhile
                    self._fleet.learn(view, state.beginnings, first)
        except httpx.ConnectError as error:  # the port is closed: the process is gone
            self._say(view, str(error))
            self._fleet.lost(view)
        except (httpx.HTTPError, StateError) as error:
            self._say(view, str(error) or type(error).__name__)
            self._fleet.silent(view)

    def _asked(self, view: ReplicaView, task: asyncio.Task[None]) -> None:
        del self._asking[view]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a replica's state is invalid", exc_info=error)

    def _say(self, view: ReplicaView, why: str) -> None:
        """Record why a poll failed, and log the reason once while it lasts."""
        if view.problem != why:
            view.problem = why
            log.warning("no state from replica %s: %s", view.name, why)
