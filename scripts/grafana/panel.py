"""One panel of the dashboard."""

from dataclasses import dataclass
from typing import Any

from scripts.grafana.queries import Queries

SELECTOR = 'job=~"$job",instance=~"$instance"'
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

Json = dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """`@` in a query stands for the labels that the dashboard's variables choose. `unit` is one of Grafana's."""

    title: str
    description: str
    unit: str
    queries: Queries
    kind: str = "timeseries"
    width: int = 8
    stack: bool = False
    red: float | None = None  # from here on
    green: float | None = None  # from here on, and red below
    least: float | None = 0  # of the axis
    most: float | None = None

    def to_json(self, number: int, x: int, y: int) -> Json:
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": DATASOURCE,
            "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
            "fieldConfig": {"defaults": self._field(), "overrides": []},
            "options": self._options(),
            "targets": [self._target(index, *query) for index, query in enumerate(self.queries)],
        }

    @property
    def height(self) -> int:
        return 4 if self.kind == "stat" else 8

    def _target(self, index: int, query: str, legend: str) -> Json:
        target: Json = {
            "refId": chr(ord("A") + index),
            "datasource": DATASOURCE,
            "expr": query.replace("@", SELECTOR),
            "legendFormat": "{{le}}" if self.kind == "heatmap" else legend,
        }
        if self.kind == "heatmap":
            target["format"] = "heatmap"
        if self.kind == "stat":
            target["instant"] = True
        return target

    def _field(self) -> Json:
        steps: list[Json] = [{"color": "green" if self.green is None else "red", "value": None}]
        steps += [{"color": "red", "value": self.red}] if self.red is not None else []
        steps += [{"color": "green", "value": self.green}] if self.green is not None else []
        field: Json = {"unit": self.unit, "thresholds": {"mode": "absolute", "steps": steps}}
        field |= {name: value for name, value in (("min", self.least), ("max", self.most)) if value is not None}
        if self.kind == "timeseries":
            field["custom"] = {
                "drawStyle": "line",
                "lineWidth": 1,
                "fillOpacity": 25 if self.stack else 8,
                "showPoints": "never",
                "spanNulls": False,
                "stacking": {"mode": "normal" if self.stack else "none", "group": "A"},
                "thresholdsStyle": {"mode": "line" if self.red is not None else "off"},
            }
        return field

    def _options(self) -> Json:
        match self.kind:
            case "stat":
                reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
                return {"reduceOptions": reduce, "colorMode": "value", "graphMode": "none", "textMode": "auto"}
            case "heatmap":
                axis = {"unit": self.unit}
                return {"calculate": False, "yAxis": axis, "color": {"mode": "scheme", "scheme": "Blues", "steps": 32}}
        legend = {"displayMode": "list", "placement": "bottom", "showLegend": True}
        return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
