"""What holds the memory of keys and values."""

from scripts.grafana.panel import Panel
from scripts.grafana.queries import level, rate, total

KV = (
    Panel(
        "KV blocks",
        "Used and in the pool, by replica.",
        "none",
        (
            ("sluice_kv_blocks_used{@}", "{{instance}} used"),
            ("sluice_kv_blocks{@}", "{{instance}} pool"),
        ),
    ),
    Panel(
        "KV bytes, by tenant",
        "Held by each tenant's sequences.",
        "bytes",
        level("sluice_kv_bytes", "tenant"),
        stack=True,
    ),
    Panel(
        "Wasted",
        "Allocated, and no token is in it yet.",
        "bytes",
        (("sum(sluice_kv_wasted_bytes{@})", "wasted"),),
    ),
    Panel(
        "Preemptions, by cause",
        "memory: lost their blocks to others; lower --max-num-seqs or give more memory. limit: of their own tenant.",
        "ops",
        rate("sluice_preemptions_total", "cause"),
    ),
    Panel(
        "Computed again",
        "Tokens, after preemptions. Ours to pay: no tenant is charged for them.",
        "short",
        total("sluice_recomputed_tokens_total", "tokens"),
    ),
    Panel(
        "Device memory",
        "Of the model: weights, KV cache, and on a GPU what torch has reserved besides.",
        "bytes",
        level("sluice_device_memory_bytes", "use"),
        stack=True,
    ),
)
