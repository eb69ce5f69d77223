"""The event loop, spans, pushes and log lines."""

from scripts.grafana.panel import Panel
from scripts.grafana.queries import rate, total

TELEMETRY = (
    Panel(
        "Event loop lag",
        "The most by which it woke late. Above 50 ms: the process lacks CPU, or something blocks it.",
        "s",
        (("sluice_loop_lag_seconds{@}", "{{instance}}"),),
        red=0.05,
    ),
    Panel(
        "Starved",
        "Of the time, by which the event loop was late. Above 5 %: what the process waits for seems slow and is not.",
        "percentunit",
        (("rate(sluice_loop_late_seconds_total{@}[$__rate_interval])", "{{instance}}"),),
        red=0.05,
    ),
    Panel(
        "Held by the process",
        "Connections of clients, tasks of the event loop, spans that wait to be sent. Under a steady load, flat.",
        "short",
        (
            ("sluice_connections{@}", "{{instance}} connections: {{state}}"),
            ("sluice_tasks{@}", "{{instance}} tasks"),
            ("sluice_spans_waiting{@}", "{{instance}} spans"),
            ("process_open_fds{@}", "{{instance}} descriptors"),
            ("process_threads{@}", "{{instance}} threads"),
        ),
    ),
    Panel(
        "Connections that made room",
        "Closed at the limit for a newcomer, by what they were at. Refused: nobody could make room.",
        "ops",
        rate("sluice_connections_closed_total", "state") + total("sluice_connections_refused_total", "refused"),
    ),
    Panel(
        "Memory",
        "Of the process, and of each HTTP worker, in RAM.",
        "bytes",
        (
            ("process_resident_memory_bytes{@}", "{{instance}}"),
            ("sluice_http_worker_resident_memory_bytes{@}", "{{instance}} HTTP worker {{worker}}"),
        ),
    ),
    Panel(
        "HTTP workers",
        "Those that serve. Fewer than there were: one is being started again.",
        "short",
        (("sluice_http_workers{@}", "{{instance}}"),),
    ),
    Panel(
        "HTTP workers that died",
        "Each was started again, and the log says with which status it ended.",
        "ops",
        total("sluice_http_worker_restarts_total", "restarts"),
    ),
    Panel(
        "Time of HTTP workers",
        "Of a core each, and by which their event loops were late. All near one core: more workers.",
        "percentunit",
        (
            ("rate(sluice_http_worker_cpu_seconds_total{@}[$__rate_interval])", "{{instance}} {{worker}} busy"),
            ("rate(sluice_http_worker_loop_late_seconds_total{@}[$__rate_interval])", "{{instance}} {{worker}} late"),
        ),
        red=1.0,
    ),
    Panel(
        "Spans",
        "Handed to the collector, and lost because it is down or slow.",
        "ops",
        total("sluice_spans_exported_total", "exported")
        + total("sluice_spans_dropped_total", "dropped")
        + total("sluice_traces_capped_total", "requests not traced for the cap"),
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
        total("sluice_log_lines_dropped_total", "lines"),
    ),
)
