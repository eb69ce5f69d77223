"""One HTTP worker: a process that speaks HTTP and asks the engine of another. Started by `WorkerPool`, with two open
files: the port to listen on and the link to the engine's process.

It knows nothing but what that process tells it first, takes no signals, and ends when the link does.
"""

import asyncio
import gc
import math
import pickle
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import uvloop

from backend.text.tokenizer import Tokenizer
from gateway.api.body_reader import open_body_reader
from gateway.api.frontend import Frontend, ServedModel, longest_context, served_encoders
from gateway.api.guardrail import open_guardrails
from gateway.api.routes import make_app, make_probes
from gateway.background import beside
from gateway.batches.file_bytes import FileBytes
from gateway.http.cors import Cors
from gateway.http.request_scope import ActiveRequests
from gateway.http.server import Server
from gateway.idle_memory import give_back_when_idle
from gateway.settings.machine import GC_THRESHOLDS
from gateway.settings.settings import Settings
from gateway.telemetry.logs.logs import STDERR, logging_to
from gateway.telemetry.metrics.delivery import DeliveryMetrics
from gateway.telemetry.request_record import Telemetry
from gateway.tenants.auth import KeyRing
from gateway.tenants.effective_policy import EffectivePolicies
from gateway.tenants.sealer import Sealer
from gateway.workers.link import FrameKind, read_frame
from gateway.workers.messages import Setup
from gateway.workers.stats import report
from gateway.workers.worker_client import MirroredPolicy, WorkerClient


class WorkerServer(Server):
    """Serves the tenants' port until the link tells it to end; it ignores signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run_worker() -> None:
    """Serve until the engine's process ends it."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal, and perhaps a supervisor, signals all processes
        signal.signal(number, signal.SIG_IGN)
    port, link = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    kind, pickled = read_frame(link)
    assert kind is FrameKind.SETUP
    setup: Setup = pickle.loads(pickled)  # noqa: S301 - from the parent process
    control = setup.settings.chat_control_tokens
    tokenizer = Tokenizer.from_dir(setup.model_dir, setup.vocab_size, control)
    others = {one.name: (one, Tokenizer.from_dir(folder, size, control)) for one, folder, size in setup.others}
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    with logging_to(STDERR, setup.settings), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(setup, tokenizer, others, port, link))


async def _serve(
    setup: Setup,
    tokenizer: Tokenizer,
    others: Mapping[str, tuple[ServedModel, Tokenizer]],
    port: socket.socket,
    link: socket.socket,
) -> None:
    settings, clock = share(setup.settings), time.monotonic
    keys, policies = KeyRing(setup.pepper, setup.keys), MirroredPolicy(setup.policy)
    active_requests = ActiveRequests(settings.write_timeout)
    server = WorkerServer(settings, active_requests, lambda: client.link.send(FrameKind.READY))
    client = WorkerClient(
        keys, policies, setup.refused_tenants, setup.refused_keys, clock, drain=server.drain, end=server.end
    )
    client.adapters.update(setup.adapters)
    telemetry, deliveries = Telemetry(clock), DeliveryMetrics(clock)
    telemetry.on_end.append(client.ended)
    link.setblocking(False)
    await asyncio.get_running_loop().create_unix_connection(lambda: client.link, sock=link)
    async with (
        open_body_reader(settings, longest_context(setup.model, others)) as body_reader,
        open_guardrails(clock) as guardrails,
    ):
        frontend = Frontend(
            model=setup.model,
            tokenizer=tokenizer,
            keys=keys,
            effective_policies=EffectivePolicies(policies),
            telemetry=telemetry,
            deliveries=deliveries,
            active_requests=active_requests,
            body_reader=body_reader,
            engine=client,
            sealer=(sealer := Sealer.of(settings, setup.pepper)),
            files=FileBytes(settings.state_dir / "files", sealer),
            guardrails=guardrails,
            encoders=served_encoders(
                [(one, Tokenizer.from_dir(one.directory, one.vocab_size)) for one in setup.encoders]
            ),
            adapters=client.adapters,
            others=others,
            cors=Cors.of(settings.cors_origins),
            public_models=settings.public_models == "on",
        )
        server.config.app = make_app(frontend, make_probes(frontend), settings.metrics_on_tenant_port)
        idle = give_back_when_idle(lambda: not telemetry.live)
        async with beside(active_requests.sweep(), report(client, server.table, deliveries), idle):
            await server.serve(sockets=[port])
    client.link.close()
    for one in (tokenizer, *(other for _, other in others.values())):
        one.close()


def share(settings: Settings) -> Settings:
    """The settings of one worker: its share of connections and of unparsed bytes."""
    num_workers = settings.num_http_workers
    unparsed = max(2 * settings.max_body_bytes, settings.max_unparsed_bytes // num_workers)
    connections = math.ceil(settings.max_connections / num_workers)
    return settings.model_copy(update={"max_connections": connections, "max_unparsed_bytes": unparsed})


if __name__ == "__main__":
    run_worker()
