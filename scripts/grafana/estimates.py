"""What clients were told, and whether it held."""

from scripts.grafana.panel import Panel
from scripts.grafana.queries import quantiles, rate

ESTIMATES = (
    Panel(
        "Estimates that held",
        "Of the first and of the last token, since start. 0.9 by design; well below: the load changes too fast.",
        "percentunit",
        (("min by (token) (sluice_estimate_coverage_ratio{@})", "{{token}}"),),
        most=1,
    ),
    Panel(
        "Newest that held, worst tenants",
        "Of the last 100 estimates of a first token. Nearly always within 0.82 and 0.97.",
        "percentunit",
        (
            (
                'bottomk(5, min by (tenant) (sluice_tenant_estimate_coverage_ratio{@,token="first",window="100"}))',
                "{{tenant}}",
            ),
        ),
        most=1,
    ),
    Panel(
        "Newest that held, by class",
        "Of the last 300 estimates of the first and of the last token.",
        "percentunit",
        (
            (
                'min by (class, token) (sluice_estimate_recent_coverage_ratio{@,window="300"})',
                "{{class}} {{token}}",
            ),
        ),
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
