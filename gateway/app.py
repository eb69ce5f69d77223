"""Makes the objects that live as long as the server, and runs it."""

import asyncio
import atexit
import faulthandler
import gc
import logging
import os
import random
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
import uvloop
from tqdm import tqdm

from admission.admission import Admission
from admission.controller import Controller
from backend import compiled_core
from backend.adapter_registry import AdapterRegistry
from backend.calibration_steps import CalibrationTimes
from backend.engine import Engine
from backend.errors import ConfigError
from backend.loader import LoadedModel, load_model, shared_block_bytes
from backend.model.hub import resolve_model
from backend.parallel.runners import LeadingRunner
from backend.scheduler.kv_accounts import KVAccounts
from backend.worker.executor import Executor
from backend.worker.several_runners import SeveralRunners
from backend.worker.sleeping import SleepingWeights
from gateway.admin.overview import Process
from gateway.admin.plane import admin_plane
from gateway.admin.port import AdminPort, open_admin_port
from gateway.announcement import Ready
from gateway.api.adapters import ServedAdapters, load_adapters
from gateway.api.body_reader import open_body_reader
from gateway.api.encoding_service import EncodingService
from gateway.api.engine_client import Health
from gateway.api.frontend import Frontend, ServedModel, served_encoders
from gateway.api.guardrail import open_guardrails
from gateway.api.in_process_client import InProcessClient
from gateway.api.prompt_pinner import PromptPinner
from gateway.api.refusal_limiter import RefusalLimiter
from gateway.api.routes import make_app, make_probes
from gateway.api.service import EngineModel, Service
from gateway.background import beside
from gateway.batches.file_bytes import FileBytes
from gateway.batches.make_runner import make_batch_runner
from gateway.batches.records import BatchRecords
from gateway.core import engine_options, make_grammar_compiler, make_prompt_names, open_core, structured_output_options
from gateway.encoders import LoadedEncoder, encoding_limits, load_encoders
from gateway.http.connection_table import ConnectionCounts
from gateway.http.cors import Cors
from gateway.http.request_scope import ActiveRequests
from gateway.http.server import Server, check_tls, open_ports
from gateway.idle_memory import give_back_when_idle
from gateway.openai.limits import Limits
from gateway.replica.announcer import announcing
from gateway.settings.machine import GC_THRESHOLDS
from gateway.settings.settings import Settings
from gateway.telemetry.core_observer import CoreTelemetry
from gateway.telemetry.logs.logs import STDERR
from gateway.telemetry.logs.otlp_log import open_otlp_log
from gateway.telemetry.logs.request_log import log_requests
from gateway.telemetry.metrics.grammars import GrammarSources
from gateway.telemetry.metrics.metrics import Metrics, Sources
from gateway.telemetry.metrics.process import count_alerts, count_losses, memory_by_use, roofline_of
from gateway.telemetry.metrics.push import pushing
from gateway.telemetry.request_record import Telemetry, record_store_call
from gateway.telemetry.tracing.tracing import open_tracing
from gateway.tenants.alert_sender import open_alert_sender
from gateway.tenants.cache_limits import CacheLimiter, KVPool, room_problems
from gateway.tenants.effective_policy import EffectivePolicies, KVShape
from gateway.tenants.kept_usage import KeptUsage
from gateway.tenants.key_source import KeySource
from gateway.tenants.key_store import KeyStore
from gateway.tenants.kv_leases import KvLeases
from gateway.tenants.live_policy import LivePolicy
from gateway.tenants.pinned_prompts import PinnedPrompts, pinned_problems
from gateway.tenants.quota_store import open_quotas, open_store
from gateway.tenants.sealer import Sealer
from gateway.tenants.shared_debts import share_debts
from gateway.version import VERSION
from gateway.watchdog import Watchdog
from gateway.workers.messages import Setup
from gateway.workers.pool import WorkerPool
from gateway.workers.stats import PoolStats
from quotas.policy.policy import Policy

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TenantSources:
    """A gateway's sources of its tenants: their keys, their policy and their use."""

    keys: KeySource
    policies: LivePolicy
    store_url: str


@dataclass(frozen=True, slots=True)
class GatewayInputs:
    """What a gateway serves, to whom and where."""

    settings: Settings
    models: Mapping[str, LoadedModel]  # by their names in the API, in the order of `settings.models`
    tenants: TenantSources
    socks: Sequence[socket.socket]
    on_started: Callable[[], object]
    admin: AdminPort | None
    encoders: Mapping[str, LoadedEncoder]

    @property
    def model(self) -> LoadedModel:
        """The first model."""
        return next(iter(self.models.values()))

    @property
    def others(self) -> list[tuple[str, LoadedModel]]:
        """All models but the first."""
        return [*self.models.items()][1:]


@asynccontextmanager
async def open_service(
    serving: GatewayInputs, engine: Engine, core_telemetry: CoreTelemetry, connections: ConnectionCounts
) -> AsyncIterator[Service]:
    """Yield a service over an engine. When the block is left, pending settlements and spans are sent.

    Raises `StoreUnsuitable`, `ModelLoadError` for an adapter, and `PolicyError` for a policy whose floors leave no room
    to serve, or whose pins do not fit.
    """
    settings, model, tenants = serving.settings, serving.model, serving.tenants
    limits = model.engine_config
    kv_shape = KVShape(limits.block_size, model.kv_bytes // limits.num_blocks, limits.window_need)
    longest = max([one.engine_config for one in serving.models.values()], key=lambda one: one.longest_blocks)
    kv_pool = KVPool.of(limits, kv_shape.block_bytes)
    kv_pool = replace(kv_pool, longest=longest.longest_blocks, max_model_len=longest.max_model_len)
    pinned_prompts = PinnedPrompts(model.tokenizer, kv_shape.block_tokens)

    def problems(policy: Policy, adapter: int) -> Iterator[tuple[str, str]]:
        pool = replace(kv_pool, adapter=adapter)
        return chain(room_problems(policy, pool), pinned_problems(policy, pool, pinned_prompts))

    def problem_of(adapter: int) -> str | None:
        return next((message for _, message in problems(tenants.policies.current, adapter)), None)

    adapters = ServedAdapters(AdapterRegistry([*serving.models.values()]), [*serving.models], problem_of)
    tenants.policies.require(lambda policy: problems(policy, adapters.largest))
    await load_adapters(settings, adapters, serving.encoders)
    telemetry, core = Telemetry(engine.clock), core_telemetry.core
    async with (
        open_tracing(settings, telemetry, core_telemetry, kv_shape) as tracing,
        open_otlp_log(settings) as otlp_log,
        log_requests(telemetry, kv_shape.block_bytes, otlp_log),
        open_quotas(settings, tenants.store_url) as quotas,
        open_alert_sender(settings, quotas.store.alerts) as alerts,
    ):
        if tracing is not None:
            quotas.store.on_command.append(record_store_call)
        admission = Admission(engine, core)
        debts = share_debts(settings, quotas.store, admission, core)
        accounts, models = KVAccounts(core.scheduler.kv_manager), _engine_models(serving, core)
        grammars, masks, prompt_names = models[0].grammars, model.runner.masks, models[0].prompt_names
        batches = BatchRecords(quotas.store.batches())
        metrics = Metrics(
            Sources(
                model=settings.served_name,
                engine=engine,
                core=core,
                core_telemetry=core_telemetry,
                telemetry=telemetry,
                policies=tenants.policies,
                store=quotas.store,
                debts=debts,
                batches=batches.counts,
                block_bytes=kv_shape.block_bytes,
                memory=partial(memory_by_use, model),
                connections=connections,
                backlog_target=settings.backlog_target,
                grammars=GrammarSources(grammars, masks) if grammars is not None and masks is not None else None,
                roofline=None if serving.others else roofline_of(model, settings.quantization),
            )
        )
        count_losses(metrics.process, tracing, otlp_log)
        count_alerts(metrics.process, alerts)
        yield Service(
            model=settings.served_name,
            created=models[0].created,
            models=dict(zip(serving.models, models, strict=True)),
            engine=engine,
            admission=admission,
            keys=tenants.keys.ring,
            policies=tenants.policies,
            effective_policies=EffectivePolicies(tenants.policies),
            quotas=quotas,
            responses=quotas.store.responses(),
            batches=batches,
            kv_leases=KvLeases(quotas.store, admission, kv_shape.block_bytes, engine.clock),
            cache_limiter=CacheLimiter(admission.limit_cache, kv_pool, tenants.policies.current),
            prompt_pinner=PromptPinner(admission, pinned_prompts, prompt_names, adapters.of_first),
            debts=debts,
            kept_usage=KeptUsage(
                accounts.cache.kept.all_block_seconds, quotas.store, kv_shape.block_bytes, engine.clock
            ),
            kv_shape=kv_shape,
            metrics=metrics,
            telemetry=telemetry,
            core=core,
            core_telemetry=core_telemetry,
            refusal_limiter=RefusalLimiter(settings.refused_per_second, engine.clock),
            encoding=EncodingService(serving.encoders, engine, core, encoding_limits(settings)),
            adapters=adapters,
            seeds=random.Random(settings.seed),
        )


def _engine_models(serving: GatewayInputs, core: Controller) -> list[EngineModel]:
    each, created = [*serving.models.values()], int(time.time())
    return [
        EngineModel(number, created, one.end_tokens, names, make_grammar_compiler(serving.settings, one))
        for number, (one, names) in enumerate(zip(each, make_prompt_names(each, core), strict=True))
    ]


def served_model(settings: Settings, name: str, model: LoadedModel, service: Service) -> ServedModel:
    """A model as the API's clients see it."""
    limits = Limits(
        model.config.vocab_size, model.engine_config.max_model_len, model.sampling_defaults, settings.unknown_fields
    )
    return ServedModel(
        name,
        service.created,
        limits,
        settings.default_max_tokens,
        model.end_tokens,
        settings.tool_followup or None,
        replace(service.kv_shape, window=model.engine_config.window_need),
        has_grammars=service.models[name].grammars is not None,
        clamps_max_tokens=settings.max_tokens_beyond_context == "clamp",
    )


CALIBRATION_SECONDS = 1.0  # before the first request
EXIT_SECONDS = 10.0  # to close the rest after a failure of the device
SWITCH_INTERVAL_SECONDS = 1e-4  # torch on a CPU re-takes the interpreter lock at every op

Announce = Callable[[Ready], object]


def run_gateway(settings: Settings, announce: Announce) -> int:
    """Serve until a signal. Returns the exit status; raises any error before the port opens.

    `announce` is called once, when requests are accepted.
    """
    faulthandler.enable(STDERR)  # a traceback for crashes of native code
    check_tls(settings)
    gc.set_threshold(*GC_THRESHOLDS)  # before a policy of many tenants is read
    policies = LivePolicy(settings.policy)
    keys = KeySource(settings, policies.current)
    with (
        open_ports(settings.host, settings.port, settings.num_http_workers or 1) as socks,
        open_admin_port(settings) as admin,
        open_store(settings) as store_url,
    ):
        tenants = TenantSources(keys, policies, store_url)
        models = _load(settings)
        model = models[0]
        encoders = load_encoders(settings, model.runner.device, model.dtype)
        if taken := [name for name in settings.models if name in encoders]:
            raise ConfigError(f"--model {taken[0]}: an embedding or score model has that name; give the model another")
        executor = SeveralRunners([one.runner for one in models]) if len(models) > 1 else model.runner
        ready = _ready(settings, models, socks[0], keys.demo_key, admin)

        def started() -> None:
            offer = f"interpreted core ({compiled_core.how_to_compile()}: it decides in half of the time)"
            core = "compiled core" if compiled_core.is_used() else offer
            where = f"{ready.url}, admin at {ready.admin_url}" if admin else ready.url
            log.info("serving %s at %s, by the %s", ready.model, where, core)
            announce(ready)

        by_name = dict(zip(settings.models, models, strict=True))
        serving = GatewayInputs(settings, by_name, tenants, socks, started, admin, encoders)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            status = runner.run(serve(serving, executor))
            if status:
                _leave_within(EXIT_SECONDS, status)
    log.info("stopped with exit status %d", status)
    return status


def _calibrated(model: LoadedModel) -> CalibrationTimes:
    if (weights := model.runner.weights) is None:
        return model.runner.calibrate(CALIBRATION_SECONDS)
    weights.wake()
    try:
        return model.runner.calibrate(CALIBRATION_SECONDS)
    finally:
        weights.sleep()


def _leave_within(seconds: float, status: int) -> None:
    """End the process within `seconds`, even if a failed device keeps its driver or a thread busy."""
    atexit.register(os._exit, status)
    timer = threading.Timer(seconds, os._exit, (status,))
    timer.daemon = True
    timer.start()


async def serve(serving: GatewayInputs, executor: Executor) -> int:
    """Run one engine and its gateway on this loop. Returns the exit status: 1 if the device failed."""
    model, models = serving.model, [*serving.models.values()]
    with open_core(serving.settings, model, models[1:]) as core:
        is_real = (executor is model.runner or isinstance(executor, SeveralRunners)) and core.calibrates
        make_batch = model.runner.calibration_batch if is_real else None
        engine = Engine(core, executor, model.engine_config.steps_in_flight, calibration_batch=make_batch)
        if is_real:
            for number, one in enumerate(models):
                core.calibrated(_calibrated(one), engine.clock(), number)
        try:
            return await serve_engine(serving, engine, CoreTelemetry(core))
        finally:
            await engine.shut_down()
            for one in models:
                if one.runner.masks is not None:
                    one.runner.masks.processes.end_all()
                one.tokenizer.close()


async def serve_engine(serving: GatewayInputs, engine: Engine, core_telemetry: CoreTelemetry) -> int:
    """Run the gateway over an engine until a signal, or the engine's failure, ends it. Returns the exit status."""
    settings, model, on_started = serving.settings, serving.model, serving.on_started
    policies, keys = serving.tenants.policies, serving.tenants.keys
    active_requests = ActiveRequests(settings.write_timeout)
    server = (
        WorkerPool(settings, on_started) if settings.num_http_workers else Server(settings, active_requests, on_started)
    )
    decoders = [one.tokenizer.decode for one in serving.models.values()]
    async with (
        open_service(serving, engine, core_telemetry, server.table) as service,
        open_body_reader(settings, core_telemetry.core.scheduler.config.max_model_len) as body_reader,
        open_guardrails(engine.clock) as guardrails,
    ):
        client = InProcessClient(service, _health(server, engine))
        frontend = Frontend(
            model=served_model(settings, service.model, model, service),
            tokenizer=model.tokenizer,
            keys=service.keys,
            effective_policies=service.effective_policies,
            telemetry=service.telemetry,
            deliveries=service.metrics.deliveries,
            active_requests=active_requests,
            body_reader=body_reader,
            engine=client,
            sealer=(sealer := Sealer.of(settings, keys.pepper)),
            files=FileBytes(settings.state_dir / "files", sealer),
            guardrails=guardrails,
            encoders=served_encoders([(one.setup, one.encoder.tokenizer) for one in serving.encoders.values()]),
            adapters=service.adapters.cards,
            others={name: (served_model(settings, name, one, service), one.tokenizer) for name, one in serving.others},
            cors=Cors.of(settings.cors_origins),
            public_models=settings.public_models == "on",
        )
        probes = make_probes(frontend)
        (server.table if isinstance(server, WorkerPool) else PoolStats(0, int)).show(service.metrics.registry)
        service.metrics.process.bind("sluice.tasks", lambda: len(asyncio.all_tasks()))
        engine.failed.add_done_callback(lambda _: server.end())
        if isinstance(model.runner, LeadingRunner):
            model.runner.others.on_lost.append(engine.fail_soon)
        engine.start()
        if (grammars := service.models[service.model].grammars) is not None:
            grammars.prepare()
        await service.follow_policies()
        watchdog = Watchdog(engine, core_telemetry.core, settings.step_timeout, engine.clock)
        device = str(model.runner.device)
        process = Process(VERSION, device, probes, lambda: server.should_exit, server.drain)
        async with (
            pushing(settings, service.metrics),
            beside(policies.follow(), keys.follow(policies)),
            beside(active_requests.sweep(), service.kv_leases.run(), watchdog.run(), service.metrics.run()),
            beside(make_batch_runner(frontend, service, settings).run()),
            beside(service.kept_usage.run(), *([service.debts.run()] if service.debts else [])),
            beside(give_back_when_idle(lambda: not service.telemetry.live)),
            admin_plane(settings, service, keys, decoders, process, serving.admin),
            announcing(
                settings, service, serving.socks[0], serving.admin, lambda: server.started and not server.should_exit
            ),
        ):
            if isinstance(server, WorkerPool):
                server.mirror(keys, policies, service)
                await server.serve(serving.socks, client, partial(_setup, serving, frontend, client))
            else:
                server.config.app = make_app(frontend, probes, settings.metrics_on_tenant_port)
                await server.serve(sockets=[*serving.socks])
    return 1 if engine.failed.done() else 0


def _setup(serving: GatewayInputs, frontend: Frontend, client: InProcessClient) -> Setup:
    """The setup of an HTTP worker that starts now."""
    model, tenants = serving.model, serving.tenants
    return Setup(
        settings=serving.settings,
        model=frontend.model,
        model_dir=model.directory,
        vocab_size=model.config.vocab_size,
        encoders=[one.setup for one in serving.encoders.values()],
        adapters=dict(client.service.adapters.cards),
        pepper=tenants.keys.pepper,
        keys=[*tenants.keys.in_force.values()],
        policy=tenants.policies.current,
        refused_tenants={*client.service.refusal_limiter.refused_tenants},
        refused_keys={*client.service.quotas.refused},
        others=[(frontend.others[name][0], one.directory, one.config.vocab_size) for name, one in serving.others],
    )


def _health(server: Server | WorkerPool, engine: Engine) -> Health:
    return Health(
        started=lambda: server.started,
        alive=lambda: not engine.failed.done(),
        ready=lambda: not (engine.failed.done() or server.should_exit),
    )


def _load(settings: Settings) -> list[LoadedModel]:
    """Load all models, which share the KV memory that the first one takes."""
    torch.set_num_threads(settings.threads)
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    with tqdm(unit="B", unit_scale=True, desc="loading weights", disable=None, leave=False) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        directories = [resolve_model(name) for name in settings.models.values()]
        options, loaded, block_bytes = engine_options(settings), list[LoadedModel](), 0
        if len(directories) > 1:
            block_bytes = shared_block_bytes(directories, options, settings.dtype, settings.device)
        for directory in directories:
            model = load_model(
                str(directory),
                options,
                dtype=settings.dtype,
                device=settings.device,
                kernels=settings.kernels,
                tensor_parallel=settings.tensor_parallel,
                chat_control_tokens=settings.chat_control_tokens,
                structured_output=structured_output_options(settings),
                progress=progress,
                least_block_bytes=block_bytes,
                beside=loaded[0].runner if loaded else None,
            )
            loaded.append(model)
            model.runner.warm_up()
            if settings.awake_bytes is not None and len(directories) > 1:
                model.runner.weights = SleepingWeights(model.runner.decoder, settings.state_dir / "asleep")
    gc.collect()
    gc.freeze()
    return loaded


def _show_device(model: LoadedModel) -> str:
    device = model.runner.device
    return str(device) if model.shard is None else f"{model.shard.size} ranks of {device.type}"


def _ready(
    settings: Settings,
    models: Sequence[LoadedModel],
    sock: socket.socket,
    demo_key: str | None,
    admin: AdminPort | None,
) -> Ready:
    model = models[0]
    config = model.engine_config
    return Ready(
        version=VERSION,
        host=settings.host,
        port=sock.getsockname()[1],
        tls=settings.tls_cert_file is not None,
        model=", ".join(settings.models),
        num_parameters=model.num_parameters,
        dtype=str(model.dtype).removeprefix("torch."),
        device=_show_device(model),
        num_blocks=config.num_blocks,
        kv_tokens=min(one.engine_config.kv_tokens for one in models),
        kv_bytes=model.kv_bytes,
        max_model_len=config.max_model_len,
        batch_invariant=model.runner.decoder.ops.batch_invariant,
        demo_key=demo_key if settings.is_loopback else None,  # stdout of a container is a log that others read
        admin_port=admin.number if admin else None,
        admin_host=settings.admin_host,
        num_http_workers=settings.num_http_workers,
        default_tools=model.tokenizer.has_default_tools,
        admin_key="SLUICE_ADMIN_KEY" if settings.admin_key else str(KeyStore(settings.state_dir).admin_key_path),
    )
