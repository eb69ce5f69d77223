"""Steps, batches and the device."""

from scripts.grafana.panel import Panel
from scripts.grafana.queries import level, mean, per, quantiles, total

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
        "Prices off",
        "Median share by which idle steps were off their predictions: how far charges are from the device's costs.",
        "percentunit",
        (("max by (instance) (sluice_price_drift_ratio{@})", "{{instance}}"),),
    ),
    Panel(
        "Replicas wanted",
        "Predicted work of all replicas, over the target of one: how many there should be, and how many there are.",
        "none",
        (("sum(sluice_replicas_wanted{@})", "wanted"), ("count(sluice_replicas_wanted{@})", "serving")),
    ),
    Panel(
        "Work of a replica",
        "Predicted engine time of all that runs and waits.",
        "s",
        (("max by (instance) (sluice_work_seconds{@})", "{{instance}}"),),
    ),
    Panel(
        "What a unit of work takes",
        "Coefficients of the step-time model: the step itself, tokens of prompts, rows of answers and their contexts.",
        "s",
        level("sluice_step_time_coefficient_seconds", "term"),
    ),
    Panel(
        "Calibration steps",
        "Steps that idle engines ran for what they take.",
        "ops",
        total("sluice_calibration_steps_total", "steps"),
    ),
    Panel(
        "Joining and leaving the batch",
        "Sequences by second, after a preemption again.",
        "ops",
        total("sluice_batch_joined_total", "joined") + total("sluice_batch_left_total", "left"),
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
        total("sluice_late_tokens_total", "tokens"),
    ),
    Panel(
        "Padding",
        "Tokens computed for nobody, by static batches that are padded.",
        "short",
        total("sluice_padding_tokens_total", "tokens"),
    ),
    Panel(
        "Lost steps",
        "The device had no memory for them: planned again with less.",
        "ops",
        total("sluice_lost_steps_total", "steps"),
    ),
    Panel(
        "Orphans",
        "Sequences that no request waits for. Anything but 0 is a bug.",
        "none",
        (("sum(sluice_orphans{@})", "sequences"),),
        red=1,
    ),
)
