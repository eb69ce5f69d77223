"""Snapshots of gateways that never ran. A healthy one under load, and changes to it."""

from collections.abc import Mapping
from typing import Any

from gateway.doctor.finding import Finding
from gateway.doctor.findings import findings
from gateway.doctor.snapshot import Snapshot

Row = dict[str, Any]
WINDOW = 5.0  # seconds between the two

CLASSES = {
    "interactive": {"ttft": "500ms", "time_per_output_token": "40ms", "queue": {}},
    "standard": {"ttft": "2s", "queue": {}},
    "batch": {"queue": {}},
}

BEFORE: dict[str, float] = {
    "sluice_store_connected": 1,
    "sluice_live_requests": 8,
    "sluice_reservations_outstanding": 8,
    'sluice_step_duration_seconds_count{kind="decode"}': 1000,
    'sluice_step_duration_seconds_sum{kind="decode"}': 5,
    "sluice_planning_duration_seconds_count": 1000,
    "sluice_planning_duration_seconds_sum": 0.05,
    "sluice_device_busy_seconds_total": 5,
    "sluice_batch_size_count": 1000,
    "sluice_batch_size_sum": 8000,
    "sluice_batch_joined_total": 100,
    'sluice_admissions_total{class="standard"}': 100,
    'sluice_requests_total{outcome="completed",class="standard"}': 92,
}
HEALTHY: dict[str, float] = BEFORE | {
    'sluice_step_duration_seconds_count{kind="decode"}': 1980,
    'sluice_step_duration_seconds_sum{kind="decode"}': 9.9,
    "sluice_planning_duration_seconds_count": 1980,
    "sluice_planning_duration_seconds_sum": 0.1,
    "sluice_device_busy_seconds_total": 9.9,
    "sluice_batch_size_count": 1980,
    "sluice_batch_size_sum": 15840,
    "sluice_batch_joined_total": 120,
    'sluice_admissions_total{class="standard"}': 120,
    'sluice_requests_total{outcome="completed",class="standard"}': 112,
}


def snapshot(at: float, metrics: Mapping[str, float], engine: Mapping[str, float] = {}, **now: Any) -> Snapshot:
    return Snapshot.of(at, exposition(metrics), answers(engine, **now))


def exposition(metrics: Mapping[str, float]) -> str:
    return "".join(f"{name} {value}\n" for name, value in metrics.items())


def answers(
    engine: Mapping[str, float] = {},
    tenants: tuple[Row, ...] = (),
    waiting: tuple[Row, ...] = (),
    live: tuple[Row, ...] = (),
    **overview: Any,
) -> dict[str, Row]:
    """Of the admin API, by the names that the doctor asks for."""
    facts = {
        "running": 8,
        "waiting": len(waiting),
        "max_num_seqs": 64,
        "kv_blocks": 100,
        "kv_blocks_used": 40,
        **engine,
    }
    return {
        "overview": {"draining": False, "policy": {"problem": None}, "engine": facts, **overview},
        "tenants": {"tenants": list(tenants)},
        "queue": {"waiting": list(waiting)},
        "requests": {"live": list(live), "recent": []},
        "policy": {"effective": {"classes": CLASSES}},
    }


def diagnosed(more: Mapping[str, float] = {}, less: Mapping[str, float] = {}, **now: Any) -> list[Finding]:
    """What is found where a healthy gateway has these metrics besides, and the rest all the time."""
    return findings(snapshot(10.0, BEFORE | dict(less), **now), snapshot(10.0 + WINDOW, HEALTHY | dict(more), **now))


def found(more: Mapping[str, float] = {}, less: Mapping[str, float] = {}, **now: Any) -> dict[str, Finding]:
    return {finding.name: finding for finding in diagnosed(more, less, **now)}


def waits(reason: str, waited: float = 9.0, tenant: str = "acme") -> Row:
    return {"id": "r1", "tenant": tenant, "class": "standard", "waited": waited, "prompt_tokens": 9, "reason": reason}


def lives(state: str = "decoding", reason: str | None = None, tenant: str = "acme", service: str = "standard") -> Row:
    return {"id": "r1", "tenant": tenant, "class": service, "state": state, "kv_blocks": 7, "reason": reason}


def tenant(name: str, **fields: float) -> Row:
    pins = {"kv_pinned_bytes": 0, "pinned_blocks": 0, "pinned_reuses": 0}
    return {"name": name, "running": 0, "waiting": 0, "share": 0.0, "requests": 0, "refused": 0, **pins, **fields}


def histogram(name: str, counts: Mapping[str, float], labels: str = "") -> dict[str, float]:
    """`counts` by upper bound, +Inf among them, each with those below."""
    inner = f"{labels}," if labels else ""
    outer = f"{{{labels}}}" if labels else ""
    buckets = {f'{name}_bucket{{{inner}le="{bound}"}}': count for bound, count in counts.items()}
    return buckets | {f"{name}_count{outer}": counts["+Inf"], f"{name}_sum{outer}": counts["+Inf"] * 0.1}
