"""The gateway at a glance."""

from typing import Any

from gateway.admin.history import History
from gateway.admin.policy_report import problem_of
from gateway.admin.process import Process
from gateway.service import Service


def overview(process: Process, service: Service, history: History, now: float) -> dict[str, Any]:
    """`now` in Unix seconds."""
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
    scheduler = service.watched.scheduler
    config = scheduler.config
    return {
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "oldest_wait": history.series.oldest_wait,
        "max_num_seqs": config.max_num_seqs,
        "kv_blocks": config.num_blocks,
        "kv_blocks_used": config.num_blocks - scheduler.pool.num_free,
        "block_bytes": service.kv_shape.block_bytes,
        "block_tokens": config.block_size,
        "busy": history.series.busy,
    }
