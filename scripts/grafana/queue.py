"""Who waits for the engine, by class."""

from scripts.grafana.panel import Panel
from scripts.grafana.queries import level, quantiles, rate, total

QUEUE = (
    Panel(
        "Waiting, by class",
        "Sequences that wait for the engine, those preempted included.",
        "none",
        level("sluice_queue_depth", "class"),
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
        total("sluice_deferrals_total", "deferred"),
    ),
)
