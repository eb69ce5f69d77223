"""The quota store and the policy."""

from scripts.grafana.panel import Panel
from scripts.grafana.queries import quantiles, total

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
        total("sluice_store_latency_seconds_count", "calls") + total("sluice_store_errors_total", "failures"),
    ),
    Panel(
        "Outages",
        "Times that the store was lost, in the interval.",
        "none",
        (("sum(increase(sluice_store_outages_total{@}[$__rate_interval]))", "outages"),),
    ),
    Panel(
        "Shared debts: age",
        "Since each replica last learned what others serve. Above 1 s fairness is local; 0 where none are shared.",
        "s",
        (("max(sluice_debts_staleness_seconds{@})", "the oldest"),),
        red=1.0,
    ),
    Panel(
        "Shared debts: replicas",
        "That the last exchange of each found. Less than there are: some do not reach the store.",
        "none",
        (("min(sluice_debts_replicas{@})", "the fewest"), ("max(sluice_debts_replicas{@})", "the most")),
    ),
    Panel(
        "Shared debts: service elsewhere",
        "What replicas learned of each other, in device time: with n of them up to n - 1 times what they served.",
        "percentunit",
        (("sum(rate(sluice_debts_elsewhere_seconds_total{@}[$__rate_interval]))", "learned"),),
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
        "Set aside for an outage",
        "Of limits, by what they are of: what replicas may spend while the store is away.",
        "short",
        (("sum by (resource) (sluice_quota_set_aside{@})", "{{resource}}"),),
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
