"""An HTTP worker on paper: its client and its application, over a real link to a gateway on paper in the same loop."""

import asyncio
import socket
from dataclasses import replace
from functools import partial

from gateway.api.routes import make_app
from gateway.telemetry.metrics.delivery import DeliveryMetrics
from gateway.telemetry.request_record import Telemetry
from gateway.tenants.auth import KeyRing, demo_record
from gateway.tenants.effective_policy import EffectivePolicies
from gateway.workers.messages import Message
from gateway.workers.served_worker import ServedWorker
from gateway.workers.stats import WorkerStats
from gateway.workers.worker_client import MirroredPolicy, WorkerClient
from tests.gateway.paper_gateway import KEY, Gateway

PEPPER = bytes(32)


class PaperWorker:
    """Speaks HTTP for a gateway."""

    def __init__(self, gateway: Gateway) -> None:
        clock, service = gateway.engine.clock, gateway.service
        self.reports: list[tuple[WorkerStats, Message]] = []
        self.lost = asyncio.Event()
        self.served = ServedWorker(gateway.client, lambda *report: self.reports.append(report), self.lost.set)
        self.policies = MirroredPolicy(service.policies.current)
        refused_tenants, refused_keys = {*service.refusal_limiter.refused_tenants}, {*service.quotas.refused}
        self.keys = KeyRing(PEPPER, [demo_record(KEY, PEPPER)])
        self.told = list[str]()  # to drain and to end, by the link
        self.client = WorkerClient(
            self.keys,
            self.policies,
            refused_tenants,
            refused_keys,
            clock,
            drain=lambda: self.told.append("drain"),
            end=lambda: self.told.append("end"),
        )
        self.telemetry, self.deliveries = Telemetry(clock), DeliveryMetrics(clock)
        self.telemetry.on_end.append(self.client.ended)
        service.refusal_limiter.on_suspect.append(partial(self.served.suspect, key=None))
        service.quotas.on_refused.append(lambda tenant, key: self.served.suspect(tenant, key or ""))
        self.frontend = replace(
            gateway.frontend,
            keys=self.keys,
            effective_policies=EffectivePolicies(self.policies),
            telemetry=self.telemetry,
            deliveries=self.deliveries,
            engine=self.client,
        )
        self.app = make_app(self.frontend, {})

    @property
    def is_idle(self) -> bool:
        """Whether either side of the link has forgotten every request."""
        client, served = self.client, self.served
        mine = (client._generations, client._streams, client._numbers, client._questions)
        its = (served._requests, served._charges, served._updates, served._tasks)
        return not any(mine) and not any(its)

    async def connect(self) -> None:
        loop = asyncio.get_running_loop()
        for link, end in zip((self.served.link, self.client.link), socket.socketpair(), strict=True):
            end.setblocking(False)
            await loop.create_unix_connection(lambda link=link: link, sock=end)  # type: ignore[misc]

    async def close(self) -> None:
        self.client.link.close()
        await self.lost.wait()


async def through_worker(gateway: Gateway) -> PaperWorker:
    """Have a worker speak the gateway's HTTP: of several, the last."""
    worker = PaperWorker(gateway)
    await worker.connect()
    gateway.app = worker.app
    return worker
