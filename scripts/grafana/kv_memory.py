"""What holds the memory of keys and values."""

from scripts.grafana.panel import Panel
from scripts.grafana.queries import level, per, rate, total

KV = (
    Panel(
        "KV blocks",
        "Used, idle with something cached, and in the pool, by replica.",
        "none",
        (
            ("sluice_kv_blocks_used{@}", "{{instance}} used"),
            ("sluice_kv_blocks_cached{@}", "{{instance}} idle, cached"),
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
        "KV bytes charged, by tenant",
        "Held by each tenant's sequences, or kept by its floor or pinned prompts. What tenants share counts for each.",
        "bytes",
        level("sluice_kv_charged_bytes", "tenant"),
        stack=True,
    ),
    Panel(
        "Kept by floors, by tenant",
        "Idle memory that others cannot have.",
        "bytes",
        level("sluice_kv_kept_bytes", "tenant"),
        stack=True,
    ),
    Panel(
        "Pinned, by tenant",
        "Idle memory of pinned prompts, which others cannot have.",
        "bytes",
        level("sluice_kv_pinned_bytes", "tenant"),
        stack=True,
    ),
    Panel(
        "Idle, by tenant",
        "Cached and held by nobody: anybody's memory when it is needed, but for what floors keep.",
        "bytes",
        level("sluice_kv_cached_bytes", "tenant"),
        stack=True,
    ),
    Panel(
        "Shared, reserved, kept, pinned",
        "Blocks that several sequences hold, that wait for a sequence, and that floors and pinned prompts keep while "
        "nobody uses them.",
        "none",
        (
            ("sum(sluice_kv_blocks_shared{@})", "shared"),
            ("sum(sluice_kv_blocks_reserved{@})", "reserved"),
            ("sum(sluice_kv_blocks_kept{@})", "kept"),
            ("sum(sluice_kv_blocks_pinned{@})", "pinned"),
        ),
    ),
    Panel(
        "Prefix cache hits",
        "Share of the prompt tokens that were found, and not computed.",
        "percentunit",
        per("sluice_prefix_cache_hits_total", "sluice_prefix_cache_queries_total", "hits"),
    ),
    Panel(
        "Given up and swapped",
        "Blocks a second: idle ones given up, and those copied to the host's memory and back.",
        "ops",
        (
            *total("sluice_prefix_cache_evictions_total", "given up"),
            *total("sluice_kv_swaps_declined_total", "not taken by the host"),
            *rate("sluice_kv_swapped_blocks_total", "to"),
        ),
    ),
    Panel(
        "Host blocks",
        "In the host's memory, and room there.",
        "none",
        (("sum(sluice_kv_host_blocks_used{@})", "used"), ("sum(sluice_kv_host_blocks{@})", "room")),
    ),
    Panel(
        "Swapped, by tenant",
        "In the host's memory.",
        "bytes",
        level("sluice_kv_swapped_bytes", "tenant"),
        stack=True,
    ),
    Panel(
        "Wasted, by tenant",
        "Allocated, and no token is in it yet.",
        "bytes",
        level("sluice_kv_wasted_bytes", "tenant"),
        stack=True,
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
