"""Makes the dashboard, whose panels are in scripts/grafana/:

python scripts/grafana_dashboard.py >deploy/grafana/sluice.json
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.grafana.panel import DATASOURCE, SELECTOR, Json
from scripts.grafana.rows import ROWS

UID = "sluice"
COLUMNS = 24


def dashboard() -> Json:
    return {
        "uid": UID,
        "title": "Sluice",
        "description": "A multi-tenant LLM inference gateway: who waits, for what, and whose doing it is.",
        "tags": ["sluice", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "annotations": {"list": [_restarts(), _alerts()]},
        "templating": {"list": _variables()},
        "panels": _panels(),
    }


def _variables() -> list[Json]:
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    return [source, _choice("job", "sluice_live_requests"), _choice("instance", 'sluice_live_requests{job=~"$job"}')]


def _choice(label: str, series: str) -> Json:
    query = f"label_values({series}, {label})"
    return {
        "name": label,
        "label": label.capitalize(),
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": label},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _restarts() -> Json:
    """A counter that began anew."""
    return _annotation(
        "Restarts", f"resets(sluice_device_busy_seconds_total{{{SELECTOR}}}[1m]) > 0", "{{instance}}", "blue"
    )


def _alerts() -> Json:
    query = 'ALERTS{alertname=~"Sluice.*",alertstate="firing"}'
    return _annotation("Alerts", query, "{{alertname}} {{instance}}", "red")


def _annotation(name: str, query: str, title: str, color: str) -> Json:
    return {
        "name": name,
        "datasource": DATASOURCE,
        "enable": True,
        "iconColor": color,
        "expr": query,
        "titleFormat": title,
        "step": "60s",
    }


def _panels() -> list[Json]:
    """Rows one below the other, their panels from left to right."""
    panels: list[Json] = []
    y = 0
    for title, members in ROWS.items():
        grid = {"h": 1, "w": COLUMNS, "x": 0, "y": y}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": grid})
        x, y, height = 0, y + 1, 0
        for panel in members:
            if x + panel.width > COLUMNS:
                x, y, height = 0, y + height, 0
            panels.append(panel.to_json(len(panels) + 1, x, y))
            x, height = x + panel.width, max(height, panel.height)
        y += height
    return panels


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dashboard(), indent=2) + "\n")
