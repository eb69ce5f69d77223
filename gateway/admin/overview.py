"""The gateway at a glance: the overview, the waiting queue, and the map of KV blocks."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from heapq import nsmallest
from typing import Any

import numpy as np
from starlette.types import ASGIApp

from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import Sequence
from gateway.admin.history import History
from gateway.admin.policy import problem_of
from gateway.admin.rows import MAX_ROWS, Reasons, Row, is_waiting
from gateway.api.service import Service
from gateway.background import map_in_slices
from gateway.telemetry.request_record import RequestRecord
from quotas.policy.policy import Policy

FREE = -1

TenantBlocks = tuple[str, list[int]]
"""A tenant, and blocks of one of its sequences."""


async def kv_map(scheduler: Scheduler, block_bytes: int) -> dict[str, Any]:
    """Return runs of KV blocks with the same owner, by block number.

    The event loop only copies block tables; a thread works out the runs, of which a large pool has many.
    """
    config = scheduler.config
    held_blocks = [(sequence.tenant, list(sequence.block_table)) for sequence in _holders(scheduler)]
    owners, runs = await asyncio.to_thread(_drawn, config.num_blocks, held_blocks)
    return {
        "num_blocks": config.num_blocks,
        "block_bytes": block_bytes,
        "block_tokens": config.block_size,
        "owners": owners,
        "runs": runs,
    }


def _drawn(num_blocks: int, held_blocks: list[TenantBlocks]) -> tuple[list[str], list[list[int]]]:
    """Return the owners, and runs as pairs of an owner's index and a number of blocks."""
    owners: dict[str, int] = {}
    blocks = np.full(num_blocks, FREE, dtype=np.int64)
    for tenant, held in held_blocks:
        blocks[held] = owners.setdefault(tenant, len(owners))
    ends = np.append(np.flatnonzero(np.diff(blocks)) + 1, num_blocks)
    runs: list[list[int]] = np.column_stack((blocks[ends - 1], np.diff(ends, prepend=0))).tolist()
    return list(owners), runs


def _holders(scheduler: Scheduler) -> list[Sequence]:
    """Return the sequences that hold blocks: those running, and ended ones that a step in flight still names."""
    held = dict.fromkeys(scheduler.running.values())
    for scheduled in scheduler.in_flight:
        held |= dict.fromkeys(scheduled.sequences)
    return [sequence for sequence in held if sequence.block_table]


QueueRank = tuple[bool, bool, float]


class QueueView:
    """Lists the waiting queue of one engine as it is now. Asking changes nothing, not even whose turn it is."""

    def __init__(self, scheduler: Scheduler, reasons: Reasons) -> None:
        self._scheduler = scheduler
        self._reasons = reasons

    async def listed(self, records: Iterable[RequestRecord], policy: Policy, now: float) -> dict[str, Any]:
        """List the waiting sequences by their likely turn.

        The one that was looked at last comes first, then the others by age; those of tenants at a limit of their own
        come last. Fairness between tenants, which depends on what each has used lately, is not taken into account.
        """
        waiting = [
            (timeline.sequence, record)
            for record in records
            for timeline in record.timelines
            if is_waiting(timeline.sequence)
        ]
        shown = nsmallest(MAX_ROWS, waiting, key=lambda entry: self._rank(entry[0], policy))
        rows = await map_in_slices(shown, lambda entry: self._row(*entry, now))
        return {"waiting": rows, "truncated": len(waiting) - len(shown)}

    def _rank(self, sequence: Sequence, policy: Policy) -> QueueRank:
        scheduler = self._scheduler
        level = policy.classes[min(sequence.priority_class, len(policy.classes) - 1)]
        aged = sequence.arrival - sequence.age_bonus + level.aging
        return sequence.tenant in scheduler.held_tenants, sequence is not scheduler.waiting_head, aged

    def _row(self, sequence: Sequence, record: RequestRecord, now: float) -> Row:
        return {
            "id": record.request_id,
            "response_id": record.response_id,
            "tenant": sequence.tenant,
            "class": record.service_class,
            "waited": now - sequence.arrival,
            "prompt_tokens": len(sequence.prompt),
            "reason": self._reasons.of_sequence(sequence),
        }


@dataclass(frozen=True, slots=True)
class Process:
    """Facts about the process that the admin page shows beside those of the service, and how to drain it."""

    version: str
    device: str
    probes: Mapping[str, ASGIApp]  # by path
    is_draining: Callable[[], bool]
    drain: Callable[[], object]  # stop in order


def overview(process: Process, service: Service, history: History, now: float) -> dict[str, Any]:
    """Return what the page's first screen shows; `now` is in Unix seconds."""
    policies = service.policies
    classes = [entry.name for entry in policies.current.classes]
    return {
        "version": process.version,
        "model": service.model,
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
    config = scheduler.config
    return {
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "oldest_wait": history.series.oldest_wait,
        "max_num_seqs": config.max_num_seqs,
        "kv_blocks": config.num_blocks,
        "kv_blocks_used": scheduler.kv_manager.num_held,
        "block_bytes": service.kv_shape.block_bytes,
        "block_tokens": config.block_size,
        "busy": history.series.busy,
    }
