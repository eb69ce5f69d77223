"""The whole gateway over ASGI, without a socket, on a device and a store on paper."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast
from unittest.mock import patch

from starlette.types import ASGIApp, Message

from admission.admission import Admission
from admission.core import CoreConfig, MemoryGate, make_core
from admission.encoding import EncodingLimits
from admission.outcome import Outcome
from backend.adapter_registry import AdapterRegistry
from backend.config import EngineConfig
from backend.engine import Engine
from backend.paged_kv.block_names import BlockNames
from backend.paged_kv.block_pool import PagedPool
from backend.scheduler.batch import Batch, StepOutput
from backend.scheduler.hooks import SchedulerHooks
from backend.scheduler.scheduled_step import NewToken
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.waiting_queue import WaitingQueue
from backend.text.tokenizer import Tokenizer
from gateway.api.adapters import ServedAdapters
from gateway.api.body_reader import BodyReader
from gateway.api.encoding_service import EncodingService
from gateway.api.engine_client import Health
from gateway.api.frontend import Frontend, ServedModel
from gateway.api.guardrail import Guardrails
from gateway.api.in_process_client import InProcessClient
from gateway.api.prompt_names import PromptNames
from gateway.api.prompt_pinner import PromptPinner
from gateway.api.refusal_limiter import RefusalLimiter
from gateway.api.routes import make_app
from gateway.api.service import EngineModel, Service
from gateway.batches.file_bytes import FileBytes
from gateway.batches.records import BatchRecords
from gateway.http.connection_table import ConnectionTable
from gateway.http.request_scope import ActiveRequests
from gateway.openai.limits import Limits
from gateway.telemetry.core_observer import CoreTelemetry
from gateway.telemetry.metrics.metrics import Metrics, Sources
from gateway.telemetry.request_record import Telemetry
from gateway.tenants.auth import KeyRing, demo_record
from gateway.tenants.cache_limits import CacheLimiter, KVPool
from gateway.tenants.effective_policy import EffectivePolicies, KVShape
from gateway.tenants.kept_usage import KeptUsage
from gateway.tenants.kv_leases import KvLeases
from gateway.tenants.live_policy import LivePolicy
from gateway.tenants.pinned_prompts import PinnedPrompts
from gateway.tenants.sealer import Sealer
from quotas.policy import policy as quota_policy
from quotas.policy.limit import Limit, Rate, Resource
from quotas.policy.policy import CLASSES, DEFAULTS
from quotas.quotas import Quotas
from quotas.store.responses import ResponseStore
from quotas.stored import Stored
from tests.backend.paper_device import PaperDevice
from tests.gateway.paper_store import PaperStore

END = 1
KEY = "sk-sluice-demo-0123456789"
CONFIG = EngineConfig(
    num_blocks=26, max_model_len=96, block_size=4, max_num_seqs=8, max_num_batched_tokens=32, prefill_chunk=12
)


class WatchedScheduler(Scheduler):
    """Fails when a block is released that a step in flight still names, by a record of its own."""

    def __init__(self, config: EngineConfig, waiting: WaitingQueue, hooks: SchedulerHooks) -> None:
        super().__init__(config, waiting, hooks)
        self._named: dict[int, frozenset[int]] = {}  # by step
        self.kv_manager.pool = self._Pool(self)

    class _Pool(PagedPool):
        def __init__(self, scheduler: "WatchedScheduler") -> None:
            super().__init__(CONFIG.num_blocks)
            self._scheduler = scheduler

        def release(self, blocks: list[int]) -> None:
            assert not self._scheduler.blocks_in_flight.intersection(blocks), "released while a step still names it"
            super().release(blocks)

    @property
    def blocks_in_flight(self) -> frozenset[int]:
        return frozenset[int]().union(*self._named.values())

    def schedule(self, now: float = 0.0) -> Batch | None:
        batch = super().schedule(now)
        if batch is not None:
            tables = {sequence.slot: sequence.block_table.blocks for sequence in self.running.values()}
            self._named[batch.step] = frozenset(block for slot in batch.slots for block in tables[slot])
        return batch

    def update_from_output(self, output: StepOutput, now: float = 0.0) -> list[NewToken]:
        del self._named[output.step]
        return super().update_from_output(output, now)


class PaperResponses:
    """Stores the responses of one tenant, as `ResponseStore` does."""

    def __init__(self) -> None:
        self.stored: dict[str, bytes] = {}

    async def store(self, tenant: str, response: str, previous: str | None, contents: bytes, *limits: object) -> Stored:
        self.stored[response] = contents
        return "ok"

    async def read(self, tenant: str, response: str) -> bytes | None:
        return self.stored.get(response)


class PaperExecutor:
    """Executes each step when it is waited for: one may lie launched behind it."""

    runs_ahead = True

    def __init__(self) -> None:
        self._device = PaperDevice(CONFIG.block_size)

    def launch(self, batch: Batch) -> "PaperStep":
        return PaperStep(lambda: self._device.execute(batch))


@dataclass(frozen=True)
class PaperStep:
    wait: Callable[[], StepOutput]


class Gateway:
    """Everything that `sluice serve` makes, without a socket and with a device on paper."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        with patch("admission.core.Scheduler", WatchedScheduler):
            core = make_core(CoreConfig(max_waiting=40, memory=MemoryGate.OPTIMISTIC), CONFIG)  # preempts the most
        self.scheduler = cast(WatchedScheduler, core.scheduler)
        core_telemetry = CoreTelemetry(core)
        self.engine = Engine(core, PaperExecutor())
        self.active_requests = ActiveRequests(write_timeout=3600)
        pepper = bytes(32)
        self.store = PaperStore()
        policies = LivePolicy(None)
        limited = replace(DEFAULTS, limits=(Limit(Resource.TOKENS, 10**9, Rate(60, 10**9)),))
        policies.current = quota_policy.Policy.of(CLASSES, limited)
        admission = Admission(self.engine, core)
        telemetry = Telemetry(self.engine.clock)
        connections = ConnectionTable(8)
        sources = Sources(
            "paper", self.engine, core, core_telemetry, telemetry, policies, self.store, 1024, dict, connections, 10.0
        )
        self.metrics = Metrics(sources)
        names = BlockNames(bytes(32), CONFIG.block_size)
        core.scheduler.name_blocks_by(names)
        with patch("gateway.api.prompt_names.BLOCKS_PER_TURN", 4):  # so that prompts of a few words take turns, too
            prompt_names = PromptNames(names, CONFIG.block_size)
        self.outcomes: Counter[Outcome | None] = Counter()
        telemetry.on_end.append(lambda request_record: self.outcomes.update([request_record.outcome]))
        self.service = service = Service(
            model="paper",
            created=0,
            models={"paper": EngineModel(0, 0, frozenset([END]), prompt_names, None)},
            engine=self.engine,
            admission=admission,
            keys=KeyRing(pepper, [demo_record(KEY, pepper)]),
            policies=policies,
            effective_policies=EffectivePolicies(policies),
            quotas=Quotas(self.store, heartbeat=3600),
            responses=cast(ResponseStore, PaperResponses()),
            batches=cast(BatchRecords, None),
            kv_leases=KvLeases(self.store, admission, 1024, self.engine.clock),
            cache_limiter=CacheLimiter(admission.limit_cache, KVPool.of(CONFIG, 1024), policies.current),
            prompt_pinner=PromptPinner(admission, PinnedPrompts(tokenizer, CONFIG.block_size), prompt_names),
            debts=None,
            kept_usage=KeptUsage(lambda now: {}, self.store, 1024, self.engine.clock),
            kv_shape=KVShape(CONFIG.block_size, 1024),
            metrics=self.metrics,
            telemetry=telemetry,
            core=core,
            core_telemetry=core_telemetry,
            refusal_limiter=RefusalLimiter(10_000, self.engine.clock),
            encoding=EncodingService({}, self.engine, core, EncodingLimits()),
            adapters=ServedAdapters(cast(AdapterRegistry, None), ["paper"]),
            seeds=random.Random(0),
        )
        limits = Limits(vocab_size=1024, max_model_len=CONFIG.max_model_len)
        self.client = InProcessClient(service, Health(bool, bool, bool))
        self.frontend = Frontend(
            model=ServedModel("paper", 0, limits, None, frozenset([END]), None, service.kv_shape),
            tokenizer=tokenizer,
            keys=service.keys,
            effective_policies=service.effective_policies,
            telemetry=telemetry,
            deliveries=self.metrics.deliveries,
            active_requests=self.active_requests,
            body_reader=BodyReader(2**20, 2**30, timeout=3600, max_model_len=CONFIG.max_model_len),
            engine=self.client,
            sealer=Sealer([pepper]),
            files=FileBytes(Path("/nonexistent"), Sealer([pepper])),
            guardrails=cast(Guardrails, None),
        )
        self.app: ASGIApp = make_app(self.frontend, {})


@dataclass
class Client:
    """One request over ASGI. Messages to a client that has left vanish; a client that stops reading blocks."""

    path: str
    parts: list[bytes]
    stops_reading_after: int | None = None
    key: str = KEY
    headers: dict[str, str] = field(default_factory=dict)
    sent: list[Message] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def receive(self) -> Message:
        await asyncio.sleep(0)
        if self.parts and not self.left.is_set():
            part = self.parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self.parts)}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self.stops_reading_after is not None and len(self.sent) >= self.stops_reading_after:
            await self.left.wait()
        if self.left.is_set():
            return
        self.sent.append(message)

    async def ask(self, app: ASGIApp) -> None:
        headers = [(name.encode(), value.encode()) for name, value in self.headers.items()]
        headers.append((b"authorization", f"Bearer {self.key}".encode()))
        scope = {"type": "http", "method": "POST", "path": self.path, "headers": headers, "query_string": b""}
        await app({**scope, "root_path": "", "http_version": "1.1"}, self.receive, self.send)

    async def leave_after(self, turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        self.left.set()
