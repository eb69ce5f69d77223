"""Whose doing it is."""

from scripts.grafana.panel import Panel
from scripts.grafana.queries import level, rate

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
        level("sluice_waiting_sequences", "tenant"),
        stack=True,
    ),
    Panel(
        "Work waiting, by tenant",
        "Predicted engine time of what waits.",
        "s",
        level("sluice_backlog_seconds", "tenant"),
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
        level("sluice_running_sequences", "tenant"),
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
        "Engine time that the tenant is owed for each unit of its weight. Below 0: its debt.",
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
        level("sluice_running_tokens", "tenant"),
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
