"""Picks the endpoint of one request, and follows its answer as far as the gateway reports it.

The gateway makes the attempts, one after the other, down the list of endpoints; the header that signs them is the same
for all. So each is signed as one that may not be the first: a replica takes back the charge of any before it.
"""

import asyncio
import secrets
import time
from contextlib import ExitStack
from math import inf

from starlette.types import Scope

from admission.outcome import Outcome
from fleet.app import ROUTES
from fleet.endpoint import Body, FleetEndpoint, FleetServices, outcome_of
from fleet.errors import NoReplica
from fleet.ext_proc.exchange import AnswerHead, GatewayExchange
from fleet.prediction import RoutedRequest
from fleet.view import ReplicaView
from gateway.api.client_deadlines import read_deadlines
from gateway.errors import DeadlineUnmeetable
from gateway.http.request_scope import ClientGone
from gateway.http.responses import ResponseWriter
from gateway.replica.fleet_secret import ATTEMPT_HEADER
from quotas.policy.units import show_wait
from quotas.reservation import Attempt

ANY_ATTEMPT = 2  # in a signature: perhaps not the first
LOST = frozenset({502, 503})  # statuses of the gateway's own answers


class PickEndpoint(FleetEndpoint):
    def __init__(self, services: FleetServices, exchange: GatewayExchange) -> None:
        scope = exchange.scope
        super().__init__(services, ROUTES.get((scope["method"], scope["path"]), "inference"))
        self._exchange = exchange

    async def _serve(self, scope: Scope, response: ResponseWriter, body: Body, request: RoutedRequest) -> Outcome:
        """Name the replica and its fallback. Raises `NoReplica` and `DeadlineUnmeetable`."""
        assert isinstance(body, bytes), "read as a whole"
        fleet, exchange = self._services.fleet, self._exchange
        self._services.budget.requested(request.tenant)
        view = self._pick(scope, request)
        signed = self._services.keys.fleet.header(Attempt(secrets.token_hex(16), ANY_ATTEMPT))
        headers = [(ATTEMPT_HEADER, signed), (b"x-request-id", response.request_id)]
        with ExitStack() as attempts:
            attempts.enter_context(fleet.attempt(request, view))
            await exchange.send_on([view.name, *self._fallback(request, view)], headers, body)
            head = await exchange.answer_head()
            if head is None:
                raise ClientGone
            response.status, response.started = head.status, self._services.telemetry.clock()
            served = fleet.views.get(head.served or view.name, view)
            if served is not view and served.state is not None:
                self._services.budget.take(request.tenant)
                view.retried += 1
                attempts.close()
                attempts.enter_context(fleet.attempt(request, served))
            self._answered(request, served, head)
            await self._follow()
        return outcome_of(response.status)

    def _pick(self, scope: Scope, request: RoutedRequest) -> ReplicaView:
        """The replica for a request; if that one would be late for the client, the earliest one.

        Raises `NoReplica`, and `DeadlineUnmeetable` (429) if the client will not wait for any.
        """
        fleet, subset = self._services.fleet, self._exchange.subset
        picked = fleet.pick(request, among=subset)
        if picked is None:
            raise NoReplica
        deadlines = read_deadlines(scope["headers"], True, time.time())
        patience = min(deadlines.first_token, deadlines.last_token)
        if patience == inf or fleet.first_token(request, picked) <= patience:
            return picked
        earliest = fleet.earliest(request, subset) or picked
        expected = fleet.first_token(request, earliest)
        if expected > patience:
            raise DeadlineUnmeetable(
                f"No replica is expected to have the first token within {show_wait(patience)}; the earliest "
                f"in {show_wait(expected)}. Send the request later, or wait longer.",
                expected * 1e3,
                expected - patience,
                deadlines.is_relative,
                own_backlog=True,
            )
        return earliest

    def _fallback(self, request: RoutedRequest, view: ReplicaView) -> list[str]:
        """The replica for a second attempt, if the budget allows one."""
        if not self._services.budget.is_left(request.tenant):
            return []
        other = self._services.fleet.pick(request, [view.name], self._exchange.subset)
        return [] if other is None else [other.name]

    def _answered(self, request: RoutedRequest, view: ReplicaView, head: AnswerHead) -> None:
        """Record a replica's success or failure by its answer: a refusal is neither, a missing answer a failure."""
        if b"x-sluice-dropped-reason" in head.headers:
            return
        if head.status in LOST and b"x-request-id" not in head.headers:
            self._services.fleet.failed(view, is_unreachable=False)
        else:
            self._services.fleet.answered(request, view)

    async def _follow(self) -> None:
        """Hand the rest of the answer back. Raises `ClientGone` if its end does not come."""
        try:
            await self._exchange.answer_rest()
        except asyncio.CancelledError:  # a gateway may end a finished exchange by it
            if not self._exchange.is_over:
                raise
        if not self._exchange.is_over:
            raise ClientGone
