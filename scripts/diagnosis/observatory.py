"""A gateway and its monitoring: a collector of spans, Prometheus with our rules, the dashboard, the doctor."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from backend.bound_process import bound
from tests.deploy.dashboard import PANELS, RATE_INTERVAL, filled_in
from tests.deploy.prometheus_process import PROGRAM, Prometheus, running_prometheus
from tests.gateway.server_process import ROOT, ServerProcess, eventually, running_server
from tests.gateway.telemetry.otlp_receiver import Receiver, otlp_receiver

SELECTOR = 'job=~"$job",instance=~"$instance"'  # of every query of the dashboard
SHOWN = ("sluice.tenant.id", "sluice.queue.wait_ms", "sluice.drr.deficit", "sluice.preemptions", "sluice.outcome")
STEP = ("sluice.step.number", "sluice.step.decodes", "sluice.step.prefill_tokens", "sluice.step.device_us")


@dataclass(frozen=True)
class Observatory:
    server: ServerProcess
    receiver: Receiver
    prometheus: Prometheus
    keys: dict[str, str]  # by tenant

    def panel(self, title: str) -> str:
        """The queries of a panel of the dashboard, and their present values."""
        (panel,) = [panel for panel in PANELS if panel["title"] == title]
        lines = [f"panel {title!r}, in {panel['fieldConfig']['defaults']['unit']}"]
        for target in panel["targets"]:
            lines += [f"  {_plain(target['expr'])}", *self._values(target["expr"])]
        return "\n".join(lines)

    def _values(self, query: str) -> list[str]:
        answers = self.prometheus.query(filled_in(query))
        rows = [(_labels(labels), value) for labels, value in answers if not isnan(value)]
        return [f"    {labels:40} {value:.4g}" for labels, value in sorted(rows, key=lambda row: -row[1])]

    def doctor(self) -> str:
        """The output of `sluice doctor --live`."""
        command = [sys.executable, "-m", "gateway.cli.main", "doctor", "--live", self.server.admin_url]
        environment = os.environ | {"SLUICE_ADMIN_KEY": self.server.admin_key}
        done = subprocess.run(**bound(command), env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout

    def trace(self, tenant: str, longest: str) -> str:
        """The trace of the tenant's request with the longest span of this name."""
        eventually(lambda: bool(self._roots(tenant)))
        time.sleep(1.0)  # the rest of the batch
        spans = self.receiver.spans
        of_tenant = {root.trace_id for root in self._roots(tenant)}
        candidates = [span for span in spans if span.trace_id in of_tenant and span.name.startswith(longest)]
        worst = max(candidates, key=_seconds)
        tree = [span for span in spans if span.trace_id == worst.trace_id]
        steps = [span for span in spans if any(link.trace_id == worst.trace_id for link in span.links)]
        lines = _told(tree, next(span for span in tree if span.kind == Span.SPAN_KIND_SERVER))
        return "\n".join([*lines, *map(_step, sorted(steps, key=_seconds)[-1:])])

    def _roots(self, tenant: str) -> list[Span]:
        return [span for span in self.receiver.spans if _attributes(span).get("sluice.tenant.id") == tenant]


@contextmanager
def observatory(directory: Path, *flags: str, tenants: tuple[str, ...] = ()) -> Iterator[Observatory]:
    """Everything runs until the block is left. Each of the tenants has a key."""
    if PROGRAM is None:
        sys.exit("there is no prometheus on PATH; on Debian: apt install prometheus")
    keys = {tenant: _new_key(tenant, directory / "state") for tenant in tenants}
    with ExitStack() as stack:
        receiver = stack.enter_context(otlp_receiver())
        tracing = ("--otlp-endpoint", receiver.endpoint("grpc"), "--trace-sample-ratio", "1")
        server = stack.enter_context(running_server(directory, "--threads", "1", *tracing, *flags))
        prometheus = stack.enter_context(running_prometheus(directory, server))
        yield Observatory(server, receiver, prometheus, keys | {"demo": server.key})


def _new_key(tenant: str, state: Path) -> str:
    command = [sys.executable, "-m", "gateway.cli.main", "keys", "create", tenant, "--state-dir", str(state)]
    return subprocess.run(**bound(command), cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _plain(query: str) -> str:
    """The query without its instance selector, for the only gateway."""
    plain = query.replace("$__rate_interval", RATE_INTERVAL)
    return plain.replace(f"{{{SELECTOR}}}", "").replace(f"{SELECTOR},", "")


def _labels(metric: dict[str, str]) -> str:
    kept = {name: value for name, value in metric.items() if name not in ("__name__", "job", "instance", "model_name")}
    return ", ".join(f'{name}="{value}"' for name, value in kept.items()) or "-"


def _attributes(span: Span) -> dict[str, Any]:
    pairs = ((pair.key, pair.value.WhichOneof("value"), pair.value) for pair in span.attributes)
    return {key: getattr(value, kind) if kind else None for key, kind, value in pairs}


def _seconds(span: Span) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def _step(span: Span) -> str:
    known = (
        f"{name.removeprefix('sluice.step.')}={value}" for name, value in _attributes(span).items() if name in STEP
    )
    return f"slowest of its steps that were traced: {', '.join(known)}"


def _told(tree: list[Span], span: Span, origin: int = 0, depth: int = 0) -> list[str]:
    """A line for each span: its begin, duration and main attributes; its children below."""
    origin = origin or span.start_time_unix_nano
    at = (span.start_time_unix_nano - origin) / 1e9
    known = ", ".join(
        f"{name}={round(value, 3) if isinstance(value, float) else value}"
        for name, value in _attributes(span).items()
        if name in SHOWN
    )
    events = " ".join(dict.fromkeys(event.name for event in span.events))
    name = f"{'  ' * depth}{span.name}"
    lines = [f"{name:34} {at:8.3f} s +{_seconds(span):7.3f} s  {known}{f'  [{events}]' if events else ''}".rstrip()]
    children = sorted(
        (one for one in tree if one.parent_span_id == span.span_id), key=lambda one: one.start_time_unix_nano
    )
    return lines + [line for child in children for line in _told(tree, child, origin, depth + 1)]
