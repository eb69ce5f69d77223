"""Routers and endpoint pickers, whatever gateways are chosen: their jobs are others."""

from scripts.grafana.panel import Panel
from scripts.grafana.queries import Queries

FIRST_BYTES = "sum by (le) (rate(sluice_route_first_byte_seconds_bucket[$__rate_interval]))"


def _by_replica(query: str) -> Queries:
    return ((f"sum by (replica) ({query})", "{{replica}}"),)


ROUTER = (
    Panel(
        "Requests, by outcome",
        "That routers and endpoint pickers have seen to their end, by second.",
        "reqps",
        (("sum by (outcome) (rate(sluice_route_requests_total[$__rate_interval]))", "{{outcome}}"),),
        stack=True,
    ),
    Panel(
        "First byte",
        "From a request's arrival at a router to the first byte of its answer.",
        "s",
        tuple((f"histogram_quantile({share:g}, {FIRST_BYTES})", f"p{share * 100:g}") for share in (0.5, 0.9, 0.99)),
    ),
    Panel(
        "Second attempts",
        "By second. One for ten requests may be made: near that, replicas fail or are full.",
        "ops",
        (("sum(rate(sluice_route_retries_total[$__rate_interval]))", "second attempts"),),
    ),
    Panel(
        "Cut requests settled",
        "In the interval. They ended with their replica, and are charged by what was delivered, or left to a lease.",
        "none",
        (("sum by (result) (increase(sluice_route_settlements_total[$__rate_interval]))", "{{result}}"),),
    ),
    Panel(
        "Attempts at each replica",
        "By second. Far apart for minutes: prompts that begin alike, or a replica that is slower.",
        "ops",
        _by_replica("rate(sluice_route_attempts_total[$__rate_interval])"),
        stack=True,
    ),
    Panel(
        "Open requests of each replica",
        "That it has not answered to the end, as far as routers sent them.",
        "none",
        _by_replica("sluice_route_open_requests"),
    ),
    Panel(
        "Work of each replica, as told",
        "Predicted engine time of all that runs and waits, by what the replica told routers last.",
        "s",
        (("max by (replica) (sluice_route_work_seconds)", "{{replica}}"),),
    ),
    Panel(
        "Replicas available",
        "That take new requests, as each router sees it. Fewer than there are: some drain, are silent or are left out.",
        "none",
        (("sum by (instance) (sluice_route_available)", "{{instance}}"),),
    ),
    Panel(
        "Left out",
        "Times that a replica was, for requests that failed in a row, in the interval.",
        "none",
        _by_replica("increase(sluice_route_ejections_total[$__rate_interval])"),
    ),
)
