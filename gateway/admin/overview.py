"""The gateway at a glance: the overview and the waiting queue."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from heapq import nsmallest
from typing import Any

from starlette.types import ASGIApp

from backend.scheduler.kv_accounts import KVAccounts
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import Sequence
from gateway.admin.history import History
from gateway.admin.policy import problem_of
from gateway.admin.rows import MAX_ROWS, Reasons, Row, is_waiting
from gateway.api.service import Service
from gateway.background import map_in_slices
from gateway.telemetry.request_record import RequestRecord

QueueRank = tuple[bool, float, float]


class QueueView:
    """Lists the present queue of one engine, without side effects: no turn changes."""

    def __init__(self, scheduler: Scheduler, reasons: Reasons) -> None:
        self._scheduler = scheduler
        self._reasons = reasons

    async def listed(self, records: Iterable[RequestRecord], now: float) -> dict[str, Any]:
        """List the queued sequences by when they are due; tenants at their own limit come last.

        Of a tenant's requests without deadlines a shorter one may precede an older one.
        """
        waiting = [
            (timeline.sequence, record)
            for record in records
            for timeline in record.engine.timelines
            if is_waiting(timeline.sequence)
        ]
        shown = nsmallest(MAX_ROWS, waiting, key=lambda entry: self._rank(entry[0]))
        rows = await map_in_slices(shown, lambda entry: self._row(*entry, now))
        return {"waiting": rows, "truncated": len(waiting) - len(shown)}

    def _rank(self, sequence: Sequence) -> QueueRank:
        scheduler = self._scheduler
        return sequence.tenant in scheduler.held_tenants, scheduler.hooks.due(sequence), sequence.arrival

    def _row(self, sequence: Sequence, record: RequestRecord, now: float) -> Row:
        return {
            "id": record.request_id,
            "response_id": record.response_id,
            "tenant": sequence.tenant,
            "class": record.service_class,
            "waited": now - sequence.arrival,
            "prompt_tokens": sequence.num_prompt_tokens,
            "reason": self._reasons.of_sequence(sequence),
        }


@dataclass(frozen=True, slots=True)
class Process:
    """Facts about the process that the admin page shows beside those of the service, and how to drain it."""

    version: str
    device: str
    probes: Mapping[str, ASGIApp]  # by path
    is_draining: Callable[[], bool]
    drain: Callable[[], object]  # stops in order


def overview(process: Process, service: Service, history: History, now: float) -> dict[str, Any]:
    """The contents of the page's first screen; `now` is in Unix seconds."""
    policies = service.policies
    classes = [entry.name for entry in policies.current.classes]
    return {
        "version": process.version,
        "model": ", ".join(service.models),
        "device": process.device,
        "started": service.created,
        "now": now,
        "draining": process.is_draining(),
        "policy": {"version": policies.current.version, "problem": problem_of(policies)},
        "store": "connected" if service.quotas.store.is_connected else "unavailable",
        "engine": _engine(service, history),
        "series": history.series.to_json(now, classes),
    }


def _engine(service: Service, history: History) -> dict[str, Any]:
    scheduler = service.core.scheduler
    config, kv = scheduler.config, KVAccounts(scheduler.kv_manager)
    return {
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "oldest_wait": history.series.oldest_wait,
        "max_num_seqs": config.max_num_seqs,
        "kv_blocks": config.num_blocks,
        "kv_blocks_used": kv.num_held,
        "kv_blocks_cached": kv.cache.num_idle,
        "kv_blocks_kept": kv.cache.num_floored,
        "kv_blocks_pinned": kv.cache.num_pinned,
        "host_blocks": kv.host.num_blocks,
        "host_blocks_used": kv.host.num_used,
        "block_bytes": service.kv_shape.block_bytes,
        "block_tokens": config.block_size,
        "busy": history.series.busy,
    }
