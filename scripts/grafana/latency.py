"""How long requests take."""

from scripts.grafana.panel import Panel
from scripts.grafana.queries import quantiles

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
