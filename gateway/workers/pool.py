"""The HTTP workers of a gateway: started, started again when they die, and ended in order."""

import asyncio
import logging
import pickle
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from backend.own_process import module_command, module_environment
from gateway.api.frontend import AdapterCard
from gateway.api.in_process_client import InProcessClient
from gateway.api.service import Service
from gateway.background import wait_awake
from gateway.http.server import END_SECONDS, ListenError, on_signals
from gateway.settings.settings import Settings
from gateway.tenants.key_source import KeyChange, KeySource
from gateway.tenants.live_policy import LivePolicy
from gateway.workers.link import FrameKind
from gateway.workers.messages import Message, Setup, Update
from gateway.workers.served_worker import ServedWorker
from gateway.workers.stats import PoolStats, WorkerStats, add_latencies
from quotas.policy.policy import Policy
from quotas.policy.policy_diff import PolicyEdit

log = logging.getLogger(__name__)

START_SECONDS = 60.0  # for a worker to start serving
SILENT_SECONDS = 60.0  # without a report: the worker is killed
CHECK_SECONDS = 1.0  # between looks at its silence
UPDATE_SECONDS = 5.0  # for workers to apply an edit
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.1, 5.0  # seconds before a dead worker is restarted, doubled each time
STEADY_SECONDS = 10.0  # of service, after which the pause is minimal again
LEAVE_SECONDS = 10.0  # beyond its timeouts: a worker that has not ended is killed


MakeSetup = Callable[[], Setup]


class WorkerPool:
    """Runs N processes that serve the tenants' port.

    Each has a socket of its own, which stays open here: connections that the kernel gave to a dead worker wait for its
    successor.
    """

    def __init__(self, settings: Settings, on_started: Callable[[], object]) -> None:
        self.started = False
        self.should_exit = False
        self.table = PoolStats(settings.num_http_workers, self._num_up)
        self._sockets: Sequence[socket.socket] = ()
        self._served: list[ServedWorker | None] = [None] * settings.num_http_workers
        self._on_started = on_started
        self._patience = settings.drain_delay + settings.drain_timeout + END_SECONDS + LEAVE_SECONDS
        self._ending = asyncio.Event()

    def drain(self) -> None:
        """Stop serving in an orderly way, as `Server.drain`."""
        if not self.should_exit:
            log.info("draining %d HTTP workers", self._num_up())
            self._end(FrameKind.DRAIN)

    def end(self) -> None:
        """Stop now: requests in flight are ended with an error."""
        self._end(FrameKind.END)

    async def serve(self, sockets: Sequence[socket.socket], client: InProcessClient, setup: MakeSetup) -> None:
        """Serve until `drain` or `end`, or a signal for either. Raises `ListenError` if a worker does not start."""
        self._sockets = sockets
        tasks = [
            asyncio.create_task(_Seat(self, index, sock, client, setup).run()) for index, sock in enumerate(sockets)
        ]
        try:
            with on_signals(self._signalled):
                await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in [task for task in tasks if task.done()]:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def mirror(self, keys: KeySource, policies: LivePolicy, service: Service) -> None:
        """Send the workers every edit of keys, policies and adapters, and every suspect of the refusal limiter."""

        told = policies.current

        async def keys_changed(change: KeyChange) -> None:
            records = [keys.in_force[key_id] for key_id in change.added + change.changed]
            await self.update(Update(keys=records, revoked=change.removed))

        async def policy_changed(policy: Policy) -> None:
            nonlocal told
            edit, told = await asyncio.to_thread(PolicyEdit.between, told, policy), policy
            await self.update(Update(policy=edit))

        async def adapters_changed(adapters: Mapping[str, AdapterCard]) -> None:
            await self.update(Update(adapters=dict(adapters)))

        service.adapters.on_change.append(adapters_changed)
        keys.on_change.append(keys_changed)
        policies.on_change.append(policy_changed)
        service.refusal_limiter.on_suspect.append(self.suspect)
        service.quotas.on_refused.append(lambda tenant, key: self.suspect(tenant, key or ""))

    async def update(self, update: Update) -> None:
        """Send an edit to every worker, and wait until all have applied it."""
        pickled = pickle.dumps(update)
        waiting = [asyncio.create_task(served.update(pickled)) for served in self._served if served is not None]
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=UPDATE_SECONDS)
            if late:
                log.error("%d HTTP workers have not applied an edit yet", len(late))

    def suspect(self, tenant: str, key: str | None = None) -> None:
        """Have every worker ask before it reads bodies; see `ServedWorker.suspect`."""
        for served in filter(None, self._served):
            served.suspect(tenant, key)

    def seated(self, index: int, served: ServedWorker | None) -> None:
        """Set the worker of a seat; None while it is empty."""
        self._served[index] = served
        if served is None:
            self.table.left(index)
        elif self.should_exit:
            served.link.send(FrameKind.END)

    def ready(self) -> None:
        """Count a serving worker; the gateway is ready once all serve."""
        if not self.started and self._num_up() == len(self._served):
            self.started = True
            self._on_started()

    async def until_ending(self, seconds: float) -> None:
        """Wait `seconds`, or until the workers are told to end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ending.wait()

    async def leave(self, exited: "asyncio.Task[int]") -> None:
        """Wait until a worker that was told to end has exited; kill it after its own timeouts and `LEAVE_SECONDS`."""
        ending = asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait({exited, ending}, return_when=asyncio.FIRST_COMPLETED)
            await wait_awake(self._patience, exited)
        finally:
            ending.cancel()

    def _end(self, kind: FrameKind) -> None:
        self.should_exit = True
        self._ending.set()
        for sock in self._sockets:
            sock.close()  # the port closes with the last worker that listens
        for served in filter(None, self._served):
            served.link.send(kind)

    def _signalled(self) -> None:
        if self.should_exit:
            self.end()
        else:
            self.drain()

    def _num_up(self) -> int:
        return sum(served is not None and served.ready.done() for served in self._served)


class _Seat:
    """The place of one worker, with its socket: a dead worker's successor takes it over."""

    def __init__(
        self,
        pool: WorkerPool,
        index: int,
        sock: socket.socket,
        client: InProcessClient,
        setup: MakeSetup,
    ) -> None:
        self._pool = pool
        self._index = index
        self._sock = sock
        self._client = client
        self._setup = setup
        self._silence = 0.0  # seconds without a report

    async def run(self) -> None:
        """Start a worker, and a successor whenever it dies, until the pool ends. Raises `ListenError` if it dies before
        the gateway serves.
        """
        pool, loop, pause = self._pool, asyncio.get_running_loop(), MIN_PAUSE_SECONDS
        while not pool.should_exit:
            began = loop.time()
            try:
                ended = f"ended with status {await self._serve()}"
            except OSError as error:  # short of memory or files for another process
                ended = f"could not be started ({error})"
            if pool.should_exit:
                return
            if not pool.started:
                raise ListenError(
                    f"an HTTP worker {ended} before it served: see the log; --http-workers 0 serves without them"
                )
            pool.table.num_restarts += 1
            pause = MIN_PAUSE_SECONDS if loop.time() - began > STEADY_SECONDS else min(2 * pause, MAX_PAUSE_SECONDS)
            log.error("HTTP worker %d %s; another starts in %.1f s", self._index, ended, pause)
            await pool.until_ending(pause)

    async def _serve(self) -> int:
        """Run one worker from its start to its end, and return its exit status."""
        lost = asyncio.Event()
        served = ServedWorker(self._client, self._reported, lost.set)
        process = await self._start(served)
        exited, watch = asyncio.create_task(process.wait()), asyncio.create_task(self._watch(served, process))
        try:
            await self._pool.leave(exited)
        finally:
            watch.cancel()
            if process.returncode is None:
                process.kill()
            await lost.wait()
            self._pool.seated(self._index, None)
        return await exited

    async def _start(self, served: ServedWorker) -> asyncio.subprocess.Process:
        ours, theirs = socket.socketpair()
        with theirs:
            files = (self._sock.fileno(), theirs.fileno())
            command = module_command("gateway.workers.worker_process", *files)
            try:
                process = await asyncio.create_subprocess_exec(
                    *command, env=module_environment(), stdin=subprocess.DEVNULL, pass_fds=files
                )
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: served.link, sock=ours)
        served.link.send(FrameKind.SETUP, None, pickle.dumps(self._setup()))
        self._pool.seated(self._index, served)
        return process

    async def _watch(self, served: ServedWorker, process: asyncio.subprocess.Process) -> None:
        """Kill a worker that does not start serving, or stops reporting."""
        self._silence = 0.0
        served.ready.add_done_callback(self._is_ready)
        loop = asyncio.get_running_loop()
        while self._silence < (SILENT_SECONDS if served.ready.done() else START_SECONDS):
            slept = loop.time()
            await asyncio.sleep(CHECK_SECONDS)
            self.waited(loop.time() - slept)
        log.error("HTTP worker %d does not answer and is killed", self._index)
        process.kill()

    def waited(self, elapsed: float) -> None:
        """Count seconds without a report. Time in which this process stood still is not held against the worker."""
        self._silence += min(elapsed, 2 * CHECK_SECONDS)

    def _is_ready(self, _: object) -> None:
        self._silence = 0.0
        self._pool.ready()

    def _reported(self, stats: WorkerStats, latencies: Message) -> None:
        self._silence = 0.0
        self._pool.table.by_worker[self._index] = stats
        add_latencies(self._client.service.metrics.deliveries, latencies)
