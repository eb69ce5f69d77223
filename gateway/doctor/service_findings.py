"""Findings around the engine: the quota store, clients, the policy, the event loop, and telemetry."""

from gateway.doctor.finding import Finding, Severity
from gateway.doctor.snapshot import Json, Window
from quotas.policy.units import counted, show_wait

SLOW_STORE_SECONDS = 0.025  # of a call, for which each request waits: a twentieth of an urgent class's target
SLOW_CALL_SHARE = 0.5  # of the calls: a store that is far away is slow for all
MIN_STORE_CALLS = 5.0
LAG_SECONDS = 0.05  # longer than an urgent class's time per token
LONG_LAG_SECONDS = 0.5  # probes and deadlines suffer as well
LATE_SHARE = 0.05  # of the time: the planning's share of a step
STALE_SECONDS = 1.0  # ten exchanges
_DEBTS = ("replicas", "staleness_seconds")
SLOW_READER = "its client reads slowly"  # prefix of the admin API's reason
MAX_NAMED_TENANTS = 3


def store_away(window: Window) -> Finding | None:
    outages = window.increase("sluice_store_outages_total")
    is_away = not window.after.samples.total("sluice_store_connected")
    if not is_away and not outages:
        return None
    return Finding(
        "store_away",
        "the quota store does not answer" if is_away else "the quota store was away",
        f"sluice_store_connected is {0 if is_away else 1}; "
        f"{counted(round(outages), 'outage')} began in the last {window.seconds:.1f} s",
        "see that it runs, has room on its disk and is reached within --redis-timeout (the log names the error); "
        "meanwhile each tenant's on_store_outage applies",
        Severity.SERIOUS if is_away else Severity.WARNING,
    )


def store_slow(window: Window) -> Finding | None:
    slow = window.above(SLOW_STORE_SECONDS, "sluice_store_latency_seconds")
    if slow.total < MIN_STORE_CALLS or slow.share < SLOW_CALL_SHARE or _is_starved(window):
        return None  # a starved process reads every answer late: see `late_loop`
    mean = window.mean("sluice_store_latency_seconds")
    return Finding(
        "store_slow",
        "the quota store is slow, and every request waits for it",
        f"{slow.count:.0f} of {slow.total:.0f} calls took longer than {slow.bound * 1e3:g} ms, {show_wait(mean)} on "
        "average",
        "put Redis near the gateway and on a core of its own; look for slow commands of others (SLOWLOG GET) and for "
        "writes to a slow disk (appendfsync always)",
    )


def store_fails(window: Window) -> Finding | None:
    failed = window.increase("sluice_store_errors_total")
    if not failed:
        return None
    return Finding(
        "store_fails",
        "calls to the quota store fail",
        f"{failed:.0f} of {window.count('sluice_store_latency_seconds'):.0f} calls failed in {window.seconds:.1f} s",
        "the log names the errors; `sluice doctor --redis-url ...` checks the server",
    )


def fairness_local(window: Window) -> Finding | None:
    replicas, staleness = (window.after.samples.total(f"sluice_debts_{what}") for what in _DEBTS)
    if replicas < 2 or staleness <= STALE_SECONDS:
        return None
    return Finding(
        "fairness_local",
        "this replica does not know the others' service: fairness holds on each replica alone",
        f"the last exchange was {staleness:.1f} s ago, among {replicas:.0f} replicas",
        "see that Redis runs and is reached within --redis-timeout; the log says why an exchange failed",
    )


def slow_clients(window: Window) -> Finding | None:
    slow = [row for row in window.after.live if str(row["reason"] or "").startswith(SLOW_READER)]
    if not slow:
        return None
    blocks = sum(row["kv_blocks"] for row in slow)
    tenants = ", ".join(sorted({str(row["tenant"]) for row in slow})[:MAX_NAMED_TENANTS])
    return Finding(
        "slow_clients",
        "clients do not read their answers",
        f"{len(slow)} of {len(window.after.live)}, of {tenants}: {_named(slow)}; they hold {blocks} KV blocks",
        "other requests are not delayed; an answer without progress for --write-timeout is cut. Many: a proxy before "
        "the gateway buffers or is overloaded",
    )


def _named(rows: list[Json]) -> str:
    return ", ".join(
        f"{row['id']} ({str(row['reason']).removeprefix(SLOW_READER + ': ')})" for row in rows[:MAX_NAMED_TENANTS]
    )


def late_loop(window: Window) -> Finding | None:
    lag, late = window.after.samples.total("sluice_loop_lag_seconds"), window.increase("sluice_loop_late_seconds_total")
    if lag <= LAG_SECONDS and not _is_starved(window):
        return None
    cpu = window.increase("process_cpu_seconds_total") / window.seconds
    runs_late = "this process is starved: its event loop runs late, so all other latencies look long"
    return Finding(
        "late_loop",
        runs_late if _is_starved(window) else "the event loop was late at times, so some latencies look long",
        f"late for {show_wait(late)} of {window.seconds:.1f} s, by up to {show_wait(lag)} in the last 15 s, while the "
        f"process had {cpu:.1f} cores",
        "reserve a core for it: lower --threads, or give the process more CPU; `sluice doctor` compares threads "
        "with cores",
        Severity.SERIOUS if lag > LONG_LAG_SECONDS else Severity.WARNING,
    )


def _is_starved(window: Window) -> bool:
    """True if the loop was late for much of the window, so that its other measurements are late too."""
    return window.increase("sluice_loop_late_seconds_total") > LATE_SHARE * window.seconds


def invalid_policy(window: Window) -> Finding | None:
    problem = window.after.overview["policy"]["problem"]
    if not problem:
        return None
    return Finding(
        "invalid_policy",
        "the edited policy is not valid, and the previous one stays in force",
        str(problem).splitlines()[0],
        "`sluice policy check PATH` names every mistake",
        Severity.SERIOUS,
    )


def lost_telemetry(window: Window) -> Finding | None:
    lost = {
        "spans": window.increase("sluice_spans_dropped_total"),
        "log lines": window.increase("sluice_log_lines_dropped_total"),
        "pushes of metrics": window.increase("sluice_metric_exports_total", result="failed")
        + window.increase("sluice_metric_exports_total", result="skipped"),
    }
    found = [f"{count:.0f} {what}" for what, count in lost.items() if count]
    if not found:
        return None
    return Finding(
        "lost_telemetry",
        "telemetry is lost",
        f"{', '.join(found)} in {window.seconds:.1f} s",
        "see that the collector at --otlp-endpoint and the reader of the log run and keep up; requests do not suffer",
    )


def orphans(window: Window) -> Finding | None:
    found = window.throughout("sluice_orphans")
    if not found:
        return None
    return Finding(
        "orphans",
        "sequences run without a request",
        f"{found:.0f} throughout {window.seconds:.1f} s",
        "this is a bug: report it with the log; a restart clears it",
        Severity.SERIOUS,
    )


def unsettled(window: Window) -> Finding | None:
    held = window.throughout("sluice_reservations_outstanding")
    is_idle = not any(snapshot.samples.total("sluice_live_requests") for snapshot in (window.before, window.after))
    if not held or not is_idle or not window.after.samples.total("sluice_store_connected"):
        return None
    return Finding(
        "unsettled",
        "ended requests still count against limits",
        f"{counted(round(held), 'reservation')} to be settled, and no request is live",
        "they are settled with the next heartbeat, a sixth of --quota-lease; if they stay, report it with the log",
    )


def draining(window: Window) -> Finding | None:
    if not window.after.overview["draining"]:
        return None
    return Finding(
        "draining",
        "the gateway is about to stop",
        f"it is draining, with {counted(len(window.after.live), 'request')} in flight",
        "none; remaining requests end with an error after --drain-timeout",
    )
