"""What the dashboard shows, row by row."""

from scripts.grafana.engine import ENGINE
from scripts.grafana.estimates import ESTIMATES
from scripts.grafana.grammars import GRAMMARS
from scripts.grafana.kv_memory import KV
from scripts.grafana.latency import LATENCY
from scripts.grafana.overview import OVERVIEW
from scripts.grafana.queue import QUEUE
from scripts.grafana.router import ROUTER
from scripts.grafana.store import STORE
from scripts.grafana.telemetry import TELEMETRY
from scripts.grafana.tenants import TENANTS

ROWS = {
    "Overview": OVERVIEW,
    "Latency": LATENCY,
    "Queue, by class": QUEUE,
    "Tenants": TENANTS,
    "KV memory": KV,
    "Engine": ENGINE,
    "Grammars": GRAMMARS,
    "Estimates and overload": ESTIMATES,
    "Quota store and policy": STORE,
    "Routers and endpoint pickers": ROUTER,
    "The gateway and its telemetry": TELEMETRY,
}
