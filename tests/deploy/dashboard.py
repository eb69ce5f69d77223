"""The dashboard as Grafana is given it."""

import json
from typing import Any

from tests.deploy.documented import DEPLOY

DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "sluice.json").read_text())
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES: list[str] = [target["expr"] for panel in PANELS for target in panel["targets"]]
ANNOTATIONS: list[str] = [annotation["expr"] for annotation in DASHBOARD["annotations"]["list"]]
RATE_INTERVAL = "10s"


def filled_in(query: str) -> str:
    """As Grafana asks Prometheus, with all gateways chosen."""
    return query.replace("$__rate_interval", RATE_INTERVAL).replace("$job", "sluice").replace("$instance", ".*")
