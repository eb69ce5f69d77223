"""These functions return what a busy gateway's admin API would answer, the same each time."""

from math import sin
from random import Random
from typing import Any

from admission.explain import BEHIND_PREFIX, REASONS
from gateway.admin.policy import effective
from quotas.policy.policy_file import parse_policy

NOW = 1_790_000_000.0
SECONDS = 300
CLASSES = ("interactive", "batch", "background")
TENANTS = ("acme", "globex", "initech", "umbrella", "hooli", "vehement", "massive-dynamic", "stark", "wayne", "tyrell")
NUM_BLOCKS = 2048
BLOCK_BYTES = 262_144
STATES = ("decoding", "decoding", "decoding", "prefill", "waiting", "waiting", "reserving", "reading", "ending")

POLICY = """\
classes:
  interactive: {service_tiers: [priority, fast], ttft: 500ms, time_per_output_token: 50ms, when_late: refuse}
  batch: {service_tiers: [flex], aging: 20s, queue: {requests: 200}}
defaults: {default_class: batch}
tenants:
  acme:
    weight: 3
    default_class: interactive
    limits: {tokens: [100k/min, 20M/day], requests: {rate: 600/min, burst: 900}, kv_bytes: 256MiB}
    price: {input: 0.5/1M, output: 2/1M, currency: EUR}
    keys: {1f0c77aa: {limits: {requests: 5/min}}}
    prefix_cache: {floor: 64MiB, ceiling: 1GiB}
  globex: {models: [qwen3-0.6b], limits: {concurrent_requests: 8}}
prefix_sharing: {friends: [acme, globex]}
"""

Json = dict[str, Any]

SETTINGS: Json = {
    "limits": {"cost": "50/month", "tokens": ["100k/min", "50M/month"]},
    "models": ["qwen3-0.6b"],
    "classes": ["batch"],
    "tags": {"project": "search"},
}


def overview() -> Json:
    return {
        "version": "0.1.0",
        "model": "qwen3-0.6b",
        "device": "cuda:0 NVIDIA H200",
        "started": NOW - 11_520,
        "now": NOW,
        "draining": False,
        "policy": {"version": "9f3c2a71", "problem": None},
        "store": "connected",
        "engine": {
            "running": 41,
            "waiting": 17,
            "oldest_wait": 31.4,
            "max_num_seqs": 64,
            "kv_blocks": NUM_BLOCKS,
            "kv_blocks_used": 1510,
            "block_bytes": BLOCK_BYTES,
            "block_tokens": 16,
            "busy": 0.934,
        },
        "series": {"seconds": 1, "end": NOW, "points": points()},
    }


def points() -> Json:
    random = Random(1)
    swell = [1 + 0.35 * sin(second / 37) + random.uniform(-0.12, 0.12) for second in range(SECONDS)]
    burst = [1.0 if 180 < second < 220 else 0.0 for second in range(SECONDS)]
    quiet = [40 < second < 52 for second in range(SECONDS)]
    return {
        "requests": [round(14 * s + 20 * b) for s, b in zip(swell, burst, strict=True)],
        "refused": [round(16 * b * s) for s, b in zip(swell, burst, strict=True)],
        "prompt_tokens": [round(2600 * s + 1900 * b) for s, b in zip(swell, burst, strict=True)],
        "output_tokens": [round(1750 * s) for s in swell],
        "ttft_p50": [None if q else 0.11 * s + 0.2 * b for s, b, q in zip(swell, burst, quiet, strict=True)],
        "ttft_p99": [None if q else 0.42 * s + 0.9 * b for s, b, q in zip(swell, burst, quiet, strict=True)],
        "oldest_wait": [round(31 * b * s) for s, b in zip(swell, burst, strict=True)],
        "gap_p50": [0.021 * s for s in swell],
        "gap_p99": [0.048 * s + 0.03 * b for s, b in zip(swell, burst, strict=True)],
        "running": [round(38 + 20 * (s - 1) + 18 * b) for s, b in zip(swell, burst, strict=True)],
        "kv_blocks_used": [round(1500 + 500 * (s - 1) + 300 * b) for s, b in zip(swell, burst, strict=True)],
        "waiting": {
            "interactive": [round(3 * b * s) for s, b in zip(swell, burst, strict=True)],
            "batch": [round(9 * s + 12 * b) for s, b in zip(swell, burst, strict=True)],
            "background": [round(5 * s) for s in swell],
        },
    }


def tenant(name: str, rank: int) -> Json:
    random = Random(rank)
    blocks = 420 // (rank + 1) if rank < 12 else 0
    return {
        "name": name,
        "weight": 1,
        "running": 12 // (rank + 1),
        "waiting": random.randrange(4),
        "kv_blocks": blocks,
        "kv_bytes": blocks * BLOCK_BYTES,
        "kv_charged_bytes": (blocks + 64) * BLOCK_BYTES,
        "kv_cached_bytes": 96 * BLOCK_BYTES,
        "kv_kept_bytes": 64 * BLOCK_BYTES,
        "kv_pinned_bytes": 32 * BLOCK_BYTES,
        "kv_swapped_bytes": 200 * BLOCK_BYTES,
        "kv_wasted_bytes": 3 * BLOCK_BYTES // 2,
        "service_seconds": 900 / (rank + 1),
        "share": 0.34 / (rank + 1),
        "credit_seconds": random.uniform(-0.6, 0.9),
        "requests": random.randrange(40, 9000),
        "refused": random.randrange(0, 90) if rank % 3 == 0 else 0,
        "prompt_tokens": random.randrange(10_000, 4_000_000),
        "output_tokens": random.randrange(10_000, 2_000_000),
    }


def tenants(names: tuple[str, ...] = TENANTS) -> Json:
    return {"tenants": [tenant(name, rank) for rank, name in enumerate(names)], "truncated": 0}


def tenant_detail(name: str) -> Json:
    limits = [
        limit("requests/min", "requests", "min", 600, 900, 212, 38.8),
        limit("tokens/day", "tokens", "day", 2_000_000, 2_000_000, None, None),
        limit("kv_bytes", "kv_bytes", None, 268_435_456, 268_435_456, 158_334_976, None),
        limit("queued_requests", "queued_requests", None, 0, 0, 0, None),
    ]
    serving = {
        "live": [live(number, name) for number in (0, 4)],
        "recent": [ended(number, name) for number in range(3)],
    }
    keys = [{"id": "key_1f0c", "scopes": ["chat"]}]
    return tenant(name, 0) | serving | {"class": "interactive", "limits": limits, "keys": keys}


def limit(
    name: str, resource: str, window: str | None, amount: int, capacity: int, left: int | None, resets_in: float | None
) -> Json:
    row = {"name": name, "resource": resource, "window": window, "amount": amount, "capacity": capacity}
    return row | {"left": left, "resets_in": resets_in}


def request(number: int, tenant: str, seed: int) -> Json:
    """Returns the fields of a request that is served or has ended."""
    return {
        "id": f"req_{Random(seed).getrandbits(128):032x}",
        "response_id": f"chatcmpl-{number:024x}",
        "tenant": tenant,
        "key": "key_1f0c",
        "model": "qwen3-0.6b",
        "operation": "chat",
        "class": CLASSES[number % len(CLASSES)],
    }


def live(number: int, tenant: str) -> Json:
    random = Random(number)
    state = STATES[number % len(STATES)]
    return request(number, tenant, number) | {
        "state": state,
        "age": 3 + 9 * random.random(),
        "prompt_tokens": random.randrange(20, 8000),
        "output_tokens": random.randrange(1, 400) if state == "decoding" else 0,
        "max_tokens": 512,
        "cached_tokens": 16 * (number % 3),
        "kv_blocks": random.randrange(2, 60),
        "preemptions": int(number % 7 == 0),
        "reason": BEHIND_PREFIX + REASONS["budget"] if state == "waiting" else None,
    }


def ended(number: int, tenant: str) -> Json:
    random = Random(number)
    refused = number % 6 == 0
    row = request(number, tenant, -1 - number) | {"ended": NOW - 3 * number - 1, "duration": random.uniform(0.01, 9)}
    if refused:
        row |= {"response_id": None, "outcome": "refused", "status": 429, "code": "rate_limit_exceeded"}
    else:
        row |= {"outcome": "completed", "status": 200, "code": None}
    return row | {
        "queue_seconds": None if refused else random.uniform(0, 0.4),
        "ttft": None if refused else random.uniform(0.05, 0.6),
        "prompt_tokens": random.randrange(20, 8000),
        "output_tokens": random.randrange(1, 400),
        "preemptions": 0,
    }


def requests(number: int = 48, names: tuple[str, ...] = TENANTS) -> Json:
    return {
        "live": [live(index, names[index * index % len(names)]) for index in range(number)],
        "recent": [ended(index, names[index * index % len(names)]) for index in range(number)],
        "truncated": 0,
    }


def timeline() -> list[Json]:
    chunks = [(0.4 + 0.11 * index, 0.5 + 0.11 * index) for index in range(5)]
    return [
        {"at": 0.0, "until": 0.0004, "what": "auth", "detail": "acme"},
        {"at": 0.0004, "until": 0.006, "what": "body", "detail": ""},
        {"at": 0.006, "until": 0.0085, "what": "reserve", "detail": ""},
        {"at": 0.0085, "until": 0.4, "what": "queue", "detail": ""},
        *({"at": at, "until": until, "what": "prefill", "detail": "512 prompt tokens"} for at, until in chunks),
        {"at": 0.94, "until": None, "what": "first token", "detail": ""},
        {"at": 0.94, "until": 1.8, "what": "decode", "detail": "64 tokens"},
        {"at": 1.8, "until": 2.3, "what": "preempted", "detail": ""},
        {"at": 2.3, "until": None, "what": "resumed", "detail": ""},
        {"at": 2.3, "until": None, "what": "decode", "detail": "96 tokens so far"},
    ]


def request_detail(row: Json) -> Json:
    return row | {"began": NOW - 4, "timeline": timeline()}


def queue(rows: list[Json]) -> Json:
    waiting = [row for row in rows if row["state"] == "waiting"]
    named = ("id", "response_id", "tenant", "class", "prompt_tokens", "reason")
    return {"waiting": [{key: row[key] for key in named} | {"waited": row["age"]} for row in waiting], "truncated": 0}


def kv(names: tuple[str, ...] = TENANTS, num_blocks: int = NUM_BLOCKS) -> Json:
    random = Random(7)
    runs: list[list[int]] = []
    left = num_blocks
    while left > 0:
        owner = min(int(random.expovariate(0.45)), len(names)) - 1
        blocks = min(left, random.randrange(1, 24))
        runs.append([owner, blocks, 0])
        left -= blocks
    size = {"num_blocks": num_blocks, "block_bytes": BLOCK_BYTES, "block_tokens": 16, "host_blocks": 0}
    return size | {"owners": list(names), "runs": runs, "kept": {}, "swapped": {}}


def kv_in_uses(names: tuple[str, ...] = TENANTS) -> Json:
    """A pool whose blocks are held, shared, reserved, idle, and pinned; and what is on the host."""
    random = Random(8)
    held = kv(names)
    runs = [
        [owner, blocks, random.choice((0, 0, 1, 2, 3, 3, 4)) if owner >= 0 else 0] for owner, blocks, _ in held["runs"]
    ]
    kept = {names[0]: 64, names[1]: 32}
    return held | {"runs": runs, "kept": kept, "swapped": {names[0]: 200, names[2]: 56}, "host_blocks": 1024}


def refusals(number: int = 30, names: tuple[str, ...] = TENANTS) -> Json:
    kinds = (
        (429, "rate_limit_exceeded", "requests-per-minute", "600 requests a minute are spent; try again in 12 s."),
        (503, "deadline_unreachable", "infeasible_deadline", "The first token would come 4.1 s after the deadline."),
        (429, "queue_full", "queue_full", "The tenant has 64 requests waiting, as many as it may."),
    )
    rows = []
    for index in range(number):
        status, code, reason, message = kinds[index % len(kinds)]
        row = {"at": NOW - 2.4 * index, "id": f"req_{index:032x}", "tenant": names[index % 3]}
        row |= {"path": "/v1/chat/completions", "status": status, "code": code, "reason": reason, "message": message}
        rows.append(row)
    return {"refusals": rows}


def policy() -> Json:
    first = ["class batch", "  aging: 2s -> 20s", "tenant globex (now named)", "  models: * -> qwen3-0.6b"]
    parsed = parse_policy({"policy.yaml": POLICY.encode()})
    return {
        "version": "9f3c2a71",
        "problem": None,
        "has_files": True,
        "named": len(parsed.tenants),
        "effective": effective(parsed, parsed.tenants),
        "truncated": 0,
        "history": [
            {"version": "9f3c2a71", "at": NOW - 400, "changes": ["tenant acme", "  weight: 1 -> 3"]},
            {"version": "11aa22bb", "at": NOW - 9000, "changes": first},
            {"version": "00000000", "at": NOW - 90_000, "changes": []},
        ],
        "edits": [{"edit": 1, "at": NOW - 400, "actor": "ada", "file": "policy.yaml", "tenant": "acme"}],
    }


def keys(names: tuple[str, ...] = TENANTS) -> Json:
    rows = [
        {
            "id": f"{Random(number).getrandbits(32):08x}",
            "tenant": name,
            "name": "" if number % 3 else f"app {number}",
            "origin": ("stored", "stored", "stored", "policy")[number % 4],
            "created": None if number % 4 == 3 else NOW - 86_400 * number,
            "expires": NOW + 86_400 * 30 if number % 2 else None,
            "expired": number == 5,
            "old_until": NOW + 3600 if number == 2 else None,
            "scopes": ["inference", "limits"],
            "settings": {} if number % 2 else SETTINGS,
            "problem": "classes: gone is not a class" if number == 4 else None,
            "named": number != 1,
        }
        for number, name in enumerate(names)
    ]
    return {"keys": rows, "truncated": 0, "tenants": sorted(names), "unnamed_tenants": "allow"}


def used(rank: int, priced: bool) -> Json:
    random = Random(rank)
    tokens = random.randrange(10_000, 90_000_000) // (rank + 1)
    return {
        "requests": tokens // 900,
        "input_tokens": tokens,
        "cached_tokens": tokens // 5,
        "output_tokens": tokens // 3,
        "reasoning_tokens": tokens // 9,
        "kv_byte_seconds": 1e9,
        "costs": {"EUR": f"{tokens / 1e6:.6f}"} if priced else {},
    }


def usage(names: tuple[str, ...] = TENANTS) -> Json:
    rows = [
        {"tenant": name, "key": None, "value": "", "named": True, **used(rank, rank % 3 != 1)}
        for rank, name in enumerate(names)
    ]
    return {
        "model": "qwen3-0.6b",
        "from": "2026-09-01",
        "to": "2026-09-21",
        "by": "tenant",
        "bill": bill(),
        "total": used(0, True),
        "rows": sorted(rows, key=lambda row: -int(row["input_tokens"])),
        "truncated": 0,
        "days": [{"day": f"2026-09-{day:02d}", **used(day % 9, True)} for day in range(1, 22)],
        "damaged": 0,
    }


def groups(values: tuple[str | None, ...]) -> list[Json]:
    """Rows of a tenant by something else."""
    return [
        {"tenant": "acme", "key": None, "value": value, "named": True, **used(rank, True)}
        for rank, value in enumerate(values)
    ]


def bill(names: tuple[str, ...] = TENANTS) -> Json:
    rows = [
        {"tenant": name, "engine_seconds": 90_000 / (rank + 1) ** 2, "cost": f"{87.5 / (rank + 1) ** 2:.6f}"}
        for rank, name in enumerate(names)
    ]
    return {
        "price_per_hour": "3.50",
        "currency": "USD",
        "running_seconds": 21 * 86_400.0,
        "cost": "1764.00",
        "idle_cost": "1628.25",
        "tokens": 812_000_000,
        "cost_per_million_tokens": "2.172413",
        "cost_per_million_tokens_busy": "0.167180",
        "rows": rows,
        "truncated": 0,
        "days": [],
        "damaged": 0,
    }


def budgets(names: tuple[str, ...] = TENANTS) -> Json:
    rows = [
        {
            "team": name if rank == 3 else None,
            "tenant": None if rank == 3 else name,
            "key": "1f0c77aa" if rank == 2 else None,
            "soft": rank == 1,
            "alerts": [{"at_percent": 80, "host": "hooks.example.com", "state": "sent" if rank else None}],
            "resource": "tokens",
            "period": "month",
            "amount": 10_000_000,
            "damaged": False,
            "left": None if rank == 5 else 300_000 * (rank + 1) ** 2,
            "resets_in": None if rank == 5 else 86_400.0 * 9,
            "set_aside": None if rank == 5 else 12_000 * (rank == 0),
            "lost": None if rank == 5 else 4_000 * (rank < 2),
        }
        for rank, name in enumerate(names[:6])
    ]
    return {"budgets": rows, "truncated": 0, "damaged": 0}


def audit() -> Json:
    actor = "key 1a2b3c4d from 10.0.0.7:51234"
    entries = [
        {"at": NOW - 60, "actor": "files", "action": "keys.change", "target": "added 77aa11bb", "result": "in force"},
        {"at": NOW - 61, "actor": actor, "action": "keys.create", "target": "77aa11bb of acme", "result": "begun"},
        {"at": NOW - 900, "actor": actor, "action": "request.cancel", "target": "req_1 of acme", "result": "cancelled"},
    ]
    return {"entries": entries}


def diagnosis() -> Json:
    finding = {
        "trouble": "queue time above target",
        "evidence": "interactive waits 0.9 s at the 99th percentile; its target is 0.5 s",
        "remedy": "raise the weight of the class or lower max_num_batched_tokens",
        "severity": "warning",
    }
    return {"findings": [finding]}
