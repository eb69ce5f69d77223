"""What the dashboard shows, row by row."""

from grafana_panel import Panel, mean, per, quantiles, rate

OVERVIEW = (
    Panel(
        "Requests",
        "Requests to generate text that ended, by second.",
        "reqps",
        (("sum(rate(sluice_requests_total{@}[$__rate_interval]))", ""),),
        "stat",
        4,
    ),
    Panel(
        "In time",
        "Share of the completed answers that met every target of their class and every deadline of their own.",
        "percentunit",
        per("sluice_goodput_requests_total", "sluice_requests_total", "", of='@,outcome="completed"'),
        "stat",
        4,
        green=0.9,
        most=1,
    ),
    Panel(
        "Failed",
        "Share of the requests that ended with an error of ours. The log has each.",
        "percentunit",
        per("sluice_requests_total", "sluice_requests_total", "", '@,outcome="failed"'),
        "stat",
        4,
        red=0.01,
    ),
    Panel("Waiting", "Sequences that wait for the engine.", "none", (("sum(sluice_queue_depth{@})", ""),), "stat", 4),
    Panel(
        "KV memory",
        "Share of the KV blocks that are used, of the fullest replica. Full with a queue: memory is the limit.",
        "percentunit",
        (("max(sluice_kv_blocks_used{@} / sluice_kv_blocks{@})", ""),),
        "stat",
        4,
        red=0.95,
        most=1,
    ),
    Panel(
        "Quota store",
        "1: every replica reaches it. 0: one does not, and serves tenants as their on_store_outage says.",
        "none",
        (("min(sluice_store_connected{@})", ""),),
        "stat",
        4,
        green=1,
        most=1,
    ),
    Panel(
        "Requests by outcome",
        "completed, invalid, refused, expired, disconnected, failed. Failed ones are the gateway's fault.",
        "reqps",
        rate("sluice_requests_total", "outcome"),
        stack=True,
    ),
    Panel(
        "Refusals by reason",
        "queue_full, deadline: the machine lacks capacity. rate, budget, concurrency, kv_quota: tenants' own limits.",
        "reqps",
        rate("sluice_refusals_total", "reason"),
        stack=True,
    ),
    Panel(
        "Tokens",
        "Prompt tokens computed and tokens generated.",
        "short",
        (
            ("sum(rate(sluice_prefill_tokens_total{@}[$__rate_interval]))", "prefill"),
            ("sum(rate(sluice_decode_tokens_total{@}[$__rate_interval]))", "decode"),
        ),
    ),
    Panel(
        "Live requests",
        "Being served, those that wait included, by replica.",
        "none",
        (("sluice_live_requests{@}", "{{instance}}"),),
        stack=True,
    ),
    Panel(
        "Clients that do not read",
        "Answers of which no byte was taken for a second, by replica. The doctor names the requests.",
        "none",
        (("sluice_stalled_writes{@}", "{{instance}}"),),
    ),
    Panel(
        "Answers in time, by class",
        "Goodput by second: completed within every target and deadline.",
        "reqps",
        rate("sluice_goodput_requests_total", "class"),
        stack=True,
    ),
    Panel(
        "Targets missed",
        "Answers that ended later than a target, by class and target.",
        "reqps",
        (("sum by (class, target) (rate(sluice_slo_misses_total{@}[$__rate_interval]))", "{{class}} {{target}}"),),
        stack=True,
    ),
)

LATENCY = (
    Panel(
        "Time to the first token",
        "From the first byte of a request to its first token. Above 2 s at p99 for a minute an alert is raised.",
        "s",
        quantiles("gen_ai_server_time_to_first_token_seconds"),
        red=2,
    ),
    Panel(
        "Time per output token",
        "Mean time of a token after the first, of each answer.",
        "s",
        quantiles("gen_ai_server_time_per_output_token_seconds"),
    ),
    Panel(
        "Whole requests",
        "From the first byte of a request to the last of its answer.",
        "s",
        quantiles("gen_ai_server_request_duration_seconds"),
    ),
    Panel(
        "Jitter between tokens",
        "Difference of each gap between two tokens from the gap before. Long tails: prompts interrupt answers.",
        "s",
        quantiles("sluice_token_jitter_seconds"),
    ),
    Panel(
        "From disconnect to stop, and to release",
        "How long a client that left still costs: until nothing is planned for it, and until its KV blocks are free.",
        "s",
        (
            *(
                (query, f"stop {legend}")
                for query, legend in quantiles("sluice_disconnect_to_stop_seconds", "", 0.5, 0.99)
            ),
            *(
                (query, f"release {legend}")
                for query, legend in quantiles("sluice_disconnect_to_release_seconds", "", 0.5, 0.99)
            ),
        ),
    ),
    Panel(
        "Requests by duration",
        "How many took how long.",
        "s",
        (("sum by (le) (increase(gen_ai_server_request_duration_seconds_bucket{@}[$__rate_interval]))", ""),),
        "heatmap",
    ),
)

QUEUE = (
    Panel(
        "Waiting, by class",
        "Sequences that wait for the engine, those preempted included.",
        "none",
        (("sum by (class) (sluice_queue_depth{@})", "{{class}}"),),
        stack=True,
    ),
    Panel(
        "Oldest, by class",
        "How long the one waits that came first. Rising without end: the class gets no service.",
        "s",
        (("max by (class) (sluice_queue_oldest_age_seconds{@})", "{{class}}"),),
    ),
    Panel(
        "Queue time, by class",
        "From arrival to the first step, of nine in ten that were admitted.",
        "s",
        quantiles("sluice_queue_time_seconds", "class", 0.9),
    ),
    Panel(
        "Admitted, by class",
        "Sequences taken into a step for the first time.",
        "ops",
        rate("sluice_admissions_total", "class"),
        stack=True,
    ),
    Panel(
        "Promoted by aging",
        "Admitted before a more urgent one of the same tenant. Many: the more urgent classes take all there is.",
        "ops",
        rate("sluice_promotions_total", "class"),
    ),
    Panel(
        "Let wait although late",
        "Expected to be later than their class is meant to be. when_late: refuse tells clients at once.",
        "ops",
        (("sum(rate(sluice_deferrals_total{@}[$__rate_interval]))", "deferred"),),
    ),
)

TENANTS = (
    Panel(
        "Engine time, by tenant",
        "Seconds of engine time used in a second: a tenant's share of the device.",
        "percentunit",
        rate("sluice_tenant_service_seconds_total", "tenant"),
        stack=True,
    ),
    Panel(
        "Waiting, by tenant",
        "One tenant alone: it is noisy, and waits for itself.",
        "none",
        (("sum by (tenant) (sluice_waiting_sequences{@})", "{{tenant}}"),),
        stack=True,
    ),
    Panel(
        "Fairness (Jain's index)",
        "1 when all tenants with work waiting got engine time by their weights, 1/n when one got all.",
        "none",
        (("min(sluice_jain_index{@})", "index"),),
        most=1,
    ),
    Panel(
        "Running, by tenant",
        "Sequences that hold a slot of the batch.",
        "none",
        (("sum by (tenant) (sluice_running_sequences{@})", "{{tenant}}"),),
        stack=True,
    ),
    Panel(
        "Tokens, by tenant",
        "Prompt tokens computed once and tokens generated.",
        "short",
        (("sum by (tenant, kind) (rate(sluice_tenant_tokens_total{@}[$__rate_interval]))", "{{tenant}} {{kind}}"),),
        stack=True,
    ),
    Panel(
        "Credit, by tenant",
        "In the fair queue. Below 0: what the tenant owes before it is served again.",
        "s",
        (("min by (tenant) (sluice_tenant_deficit_seconds{@})", "{{tenant}}"),),
        least=None,
    ),
    Panel(
        "Refused, by tenant",
        "Requests that ended refused.",
        "reqps",
        (
            (
                'sum by (tenant) (rate(sluice_tenant_requests_total{@,outcome="refused"}[$__rate_interval]))',
                "{{tenant}}",
            ),
        ),
        stack=True,
    ),
    Panel(
        "Context, by tenant",
        "Tokens in the contexts of what runs.",
        "short",
        (("sum by (tenant) (sluice_running_tokens{@})", "{{tenant}}"),),
        stack=True,
    ),
    Panel(
        "KV memory over time, by tenant",
        "Bytes held, times how long: what memory costs a tenant.",
        "bytes",
        rate("sluice_kv_byte_seconds_total", "tenant"),
        stack=True,
    ),
)

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
        (("sum by (tenant) (sluice_kv_bytes{@})", "{{tenant}}"),),
        stack=True,
    ),
    Panel(
        "Wasted, cached, swapped",
        "Allocated and empty; kept for prompts that may come again; moved to the host's memory.",
        "bytes",
        (
            ("sum(sluice_kv_wasted_bytes{@})", "wasted"),
            ("sum(sluice_kv_cached_bytes{@})", "cached"),
            ("sum(sluice_kv_swapped_bytes{@})", "swapped"),
        ),
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
        (("sum(rate(sluice_recomputed_tokens_total{@}[$__rate_interval]))", "tokens"),),
    ),
    Panel(
        "Device memory",
        "Of the model: weights, KV cache, and on a GPU what torch has reserved besides.",
        "bytes",
        (("sum by (use) (sluice_device_memory_bytes{@})", "{{use}}"),),
        stack=True,
    ),
)

ENGINE = (
    Panel(
        "Device busy",
        "Share of the time in which it computed, by replica. Low with a queue: the event loop lacks CPU.",
        "percentunit",
        (("rate(sluice_device_busy_seconds_total{@}[$__rate_interval])", "{{instance}}"),),
        most=1,
    ),
    Panel(
        "Batch size",
        "Sequences in a step: mean, p90, and the most there may be.",
        "none",
        (
            *per("sluice_batch_size_sum", "sluice_batch_size_count", "mean"),
            *quantiles("sluice_batch_size", "", 0.9),
            ("max(sluice_batch_size_max{@})", "most"),
        ),
    ),
    Panel(
        "Time of a step, by kind",
        "Mean. A mixed step carries prompts beside answers: much longer than a decode, it makes answers pause.",
        "s",
        mean("sluice_step_duration_seconds", "kind"),
    ),
    Panel(
        "Slowest steps, by kind",
        "p99 of the device time.",
        "s",
        quantiles("sluice_step_duration_seconds", "kind", 0.99),
    ),
    Panel(
        "Planning",
        "Time of the event loop to plan a step. Above a twentieth of a step it costs throughput.",
        "s",
        quantiles("sluice_planning_duration_seconds", "", 0.5, 0.99),
    ),
    Panel(
        "Joining and leaving the batch",
        "Sequences by second, after a preemption again.",
        "ops",
        (
            ("sum(rate(sluice_batch_joined_total{@}[$__rate_interval]))", "joined"),
            ("sum(rate(sluice_batch_left_total{@}[$__rate_interval]))", "left"),
        ),
    ),
    Panel(
        "Prompt tokens in a chunk",
        "Mean size of the parts that prompts are computed in.",
        "none",
        per("sluice_prefill_tokens_total", "sluice_prefill_chunks_total", "tokens"),
    ),
    Panel(
        "Late tokens",
        "Sampled after their sequence had ended: discarded, billed to nobody.",
        "short",
        (("sum(rate(sluice_late_tokens_total{@}[$__rate_interval]))", "tokens"),),
    ),
    Panel(
        "Lost steps",
        "The device had no memory for them: planned again with less.",
        "ops",
        (("sum(rate(sluice_lost_steps_total{@}[$__rate_interval]))", "steps"),),
    ),
    Panel(
        "Orphans",
        "Sequences that no request waits for. Anything but 0 is a bug.",
        "none",
        (("sum(sluice_orphans{@})", "sequences"),),
        red=1,
    ),
)

ESTIMATES = (
    Panel(
        "Estimates that held",
        "Of the first and of the last token, since start. 0.9 by design; well below: the load changes too fast.",
        "percentunit",
        (("min by (token) (sluice_estimate_coverage_ratio{@})", "{{token}}"),),
        most=1,
    ),
    Panel(
        "How far off, early and late",
        "p90 of the time between what the client was told and what came.",
        "s",
        quantiles("sluice_estimate_error_seconds", "token, side", 0.9),
    ),
    Panel(
        "Retry-After given",
        "With refusals. Long waits: the queue drains slowly.",
        "s",
        quantiles("sluice_retry_after_seconds", "", 0.5, 0.9),
    ),
    Panel(
        "Retries",
        "Not before the time they were told (true), or earlier (false).",
        "reqps",
        rate("sluice_retries_total", "honoured"),
        stack=True,
    ),
)

STORE = (
    Panel(
        "Latency, by script",
        "p90 of the calls to the quota store. Every request waits for one before it is queued.",
        "s",
        quantiles("sluice_store_latency_seconds", "script", 0.9),
        red=0.025,
    ),
    Panel(
        "Calls and failures",
        "To the quota store, by second. The log names what failed.",
        "ops",
        (
            ("sum(rate(sluice_store_latency_seconds_count{@}[$__rate_interval]))", "calls"),
            ("sum(rate(sluice_store_errors_total{@}[$__rate_interval]))", "failures"),
        ),
    ),
    Panel(
        "Outages",
        "Times that the store was lost, in the interval.",
        "none",
        (("sum(increase(sluice_store_outages_total{@}[$__rate_interval]))", "outages"),),
    ),
    Panel(
        "Reservations not settled",
        "Requests that limits count. With no live request: 0 within a heartbeat.",
        "none",
        (
            ("sum(sluice_reservations_outstanding{@})", "reservations"),
            ("sum(sluice_live_requests{@})", "live requests"),
        ),
    ),
    Panel(
        "Policy in force",
        "Replicas by policy version. More than one version for minutes: an edit has not reached all.",
        "none",
        (("count by (version) (sluice_policy_info{@})", "{{version}}"),),
        stack=True,
    ),
    Panel(
        "Edits of the policy",
        "Taken up, and not valid.",
        "none",
        (
            ("sum(increase(sluice_policy_reloads_total{@}[$__rate_interval]))", "taken up"),
            ("sum(increase(sluice_policy_reload_failures_total{@}[$__rate_interval]))", "not valid"),
        ),
    ),
)

TELEMETRY = (
    Panel(
        "Event loop lag",
        "The most by which it woke late. Above 50 ms: the process lacks CPU, or something blocks it.",
        "s",
        (("sluice_loop_lag_seconds{@}", "{{instance}}"),),
        red=0.05,
    ),
    Panel(
        "Spans",
        "Handed to the collector, and lost because it is down or slow.",
        "ops",
        (
            ("sum(rate(sluice_spans_exported_total{@}[$__rate_interval]))", "exported"),
            ("sum(rate(sluice_spans_dropped_total{@}[$__rate_interval]))", "dropped"),
            ("sum(rate(sluice_traces_capped_total{@}[$__rate_interval]))", "requests not traced for the cap"),
        ),
    ),
    Panel(
        "Pushes of metrics",
        "exported, failed, or skipped because the one before was not done.",
        "ops",
        rate("sluice_metric_exports_total", "result"),
    ),
    Panel(
        "Log lines dropped",
        "Because whoever reads the log is slow.",
        "ops",
        (("sum(rate(sluice_log_lines_dropped_total{@}[$__rate_interval]))", "lines"),),
    ),
)

ROWS = {
    "Overview": OVERVIEW,
    "Latency": LATENCY,
    "Queue, by class": QUEUE,
    "Tenants": TENANTS,
    "KV memory": KV,
    "Engine": ENGINE,
    "Estimates and overload": ESTIMATES,
    "Quota store and policy": STORE,
    "The gateway and its telemetry": TELEMETRY,
}
