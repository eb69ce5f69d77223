"""Makes the service of a gateway out of its parts."""

import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from admission.admission import Admission
from backend.engine import Engine
from backend.loader import LoadedModel
from gateway.connection_table import ConnectionTable
from gateway.entitlement import Entitlements, KvShape
from gateway.intake import Intake
from gateway.kv_leases import KvLeases
from gateway.openai import Limits
from gateway.refused_rate import RefusedRate
from gateway.scope import Lives
from gateway.service import Service
from gateway.settings import Settings
from gateway.telemetry.logs.request_log import RequestLog
from gateway.telemetry.metrics.device_memory import memory_by_use
from gateway.telemetry.metrics.losses import count_losses
from gateway.telemetry.metrics.metrics import Metrics, Sources
from gateway.telemetry.story import note_command
from gateway.telemetry.telemetry import Telemetry
from gateway.telemetry.tracing.tracing import open_tracing
from gateway.telemetry.watched_core import WatchedCore
from gateway.tenancy import Tenancy, open_quotas


@asynccontextmanager
async def open_service(
    settings: Settings,
    model: LoadedModel,
    engine: Engine,
    core: WatchedCore,
    tenancy: Tenancy,
    lives: Lives,
    connections: ConnectionTable,
) -> AsyncIterator[Service]:
    """A service over an engine; when the block is left, the store and the collector are told what is left to tell.

    Raises `StoreUnsuitable`.
    """
    kv_shape = KvShape(model.engine_config.block_size, model.kv_bytes // model.engine_config.num_blocks)
    telemetry = Telemetry(engine.clock)
    async with (
        open_tracing(settings, telemetry, core, kv_shape) as tracing,
        open_quotas(settings, tenancy.store_url) as quotas,
    ):
        intake = Intake(
            settings.max_body_bytes,
            settings.max_unparsed_bytes,
            settings.body_timeout,
            model.engine_config.max_model_len,
        )
        quotas.store.on_command.append(note_command)
        admission = Admission(engine, core)
        metrics = Metrics(
            Sources(
                model=settings.served_name,
                engine=engine,
                core=core,
                telemetry=telemetry,
                policies=tenancy.policies,
                store=quotas.store,
                block_bytes=kv_shape.block_bytes,
                memory=partial(memory_by_use, model),
                connections=connections,
            )
        )
        count_losses(metrics.process, tracing)
        telemetry.on_end.append(RequestLog(kv_shape.block_bytes))
        try:
            yield Service(
                model=settings.served_name,
                created=int(time.time()),
                end_tokens=model.end_tokens,
                limits=Limits(model.config.vocab_size, model.engine_config.max_model_len, model.sampling_defaults),
                default_max_tokens=settings.default_max_tokens,
                tokenizer=model.tokenizer,
                admission=admission,
                keys=tenancy.keys.ring,
                policies=tenancy.policies,
                entitlements=Entitlements(tenancy.policies),
                quotas=quotas,
                kv_leases=KvLeases(quotas.store, admission, kv_shape.block_bytes, engine.clock),
                kv_shape=kv_shape,
                metrics=metrics,
                telemetry=telemetry,
                watched=core,
                lives=lives,
                intake=intake,
                refused_rate=RefusedRate(settings.refused_per_second, engine.clock),
                seeds=random.Random(settings.seed),
            )
        finally:
            intake.close()
