"""The documents for SGLang's router, taken as strictly as it takes them: by type, where a wrong one is no answer."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import orjson
import pytest
from pydantic import TypeAdapter

from gateway.replica.sglang import loads, model_info, server_info
from gateway.replica.state import LoadTotals
from tests.gateway.telemetry.metrics_rig import Rig


@dataclass
class SchedulerLoadSnapshot:
    """What smg 1.13 parses of each rank, with its types."""

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_waiting_uncached_tokens: int
    num_total_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float
    gen_throughput: float
    cache_hit_rate: float
    utilization: float
    max_running_requests: int


@dataclass
class WorkerLoadResponse:
    timestamp: str
    dp_rank_count: int
    loads: list[SchedulerLoadSnapshot]


@dataclass
class ServerInfo:
    """What smg 1.13 makes labels of."""

    model_id: str
    model_path: str
    served_model_name: str
    tp_size: int
    dp_size: int
    pp_size: int
    load_balance_method: str
    disaggregation_mode: str
    version: str
    is_embedding: bool
    context_length: int
    max_total_tokens: int
    max_running_requests: int


@dataclass
class ModelInfo:
    model_path: str
    tokenizer_path: str
    is_generation: bool
    has_image_understanding: bool
    has_audio_understanding: bool


def parsed(kind: Any, document: object) -> Any:
    return TypeAdapter(kind).validate_json(orjson.dumps(document), strict=True)


def test_an_idle_replica_has_all_its_memory_and_no_load(rig: Rig) -> None:
    told = parsed(WorkerLoadResponse, loads(rig.metrics.replica.totals(), datetime.now(UTC)))
    assert told.dp_rank_count == len(told.loads) == 1
    assert told.loads[0] == SchedulerLoadSnapshot(0, 0, 0, 0, 0, 0, 64 * 4, 0.0, 0.0, 0.0, 0.0, 8)


def test_running_and_waiting_work_is_told_for_all_tenants_together(rig: Rig) -> None:
    for number in range(10):
        rig.arrive(str(number), prompt=6, max_tokens=8, tenant="secret")
    while len(rig.core.scheduler.running) < 8:
        rig.step()
    rig.plan()
    document = loads(rig.metrics.replica.totals(), datetime.now(UTC))
    assert "secret" not in str(document)
    (load,) = parsed(WorkerLoadResponse, document).loads
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (8, 2, 10)
    assert load.num_waiting_uncached_tokens == 2 * 6
    assert 8 * 6 <= load.num_used_tokens <= 64 * 4
    assert load.token_usage == pytest.approx(load.num_used_tokens / (64 * 4), abs=1e-4)
    assert load.utilization == 1.0
    assert load.gen_throughput > 0
    assert document["aggregate"]["total_reqs"] == 10
    rig.complete()


def test_a_server_says_what_it_serves_and_not_where_it_lies() -> None:
    totals = LoadTotals(0, 0, 8, 0, 0, 256, 0.0, 0.0)
    info = parsed(ServerInfo, server_info("m", 96, totals))
    assert (info.served_model_name, info.model_path, info.context_length) == ("m", "m", 96)
    assert (info.max_total_tokens, info.max_running_requests) == (256, 8)
    assert parsed(ModelInfo, model_info("m")).is_generation
