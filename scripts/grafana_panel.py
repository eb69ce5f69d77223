"""One panel of the dashboard, and the queries that panels are made of."""

from dataclasses import dataclass
from typing import Any

SELECTOR = 'job=~"$job",instance=~"$instance"'
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

Json = dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """`@` in a query stands for the labels that the dashboard's variables choose. `unit` is one of Grafana's."""

    title: str
    description: str
    unit: str
    queries: tuple[tuple[str, str], ...]  # PromQL and legend
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
        target = {
            "refId": chr(ord("A") + index),
            "datasource": DATASOURCE,
            "expr": query.replace("@", SELECTOR),
            "legendFormat": "{{le}}" if self.kind == "heatmap" else legend,
        }
        if self.kind == "heatmap":
            target["format"] = "heatmap"
        if self.kind in ("stat", "bargauge"):
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


def quantiles(metric: str, by: str = "", *shares: float) -> tuple[tuple[str, str], ...]:
    """Of a histogram, over the rate interval, by labels (separated by commas) or over all series."""
    inner = f"le, {by}" if by else "le"
    rates = f"sum by ({inner}) (rate({metric}_bucket{{@}}[$__rate_interval]))"
    legend = "".join(f"{{{{{label}}}}} " for label in by.split(", ") if label)
    return tuple(
        (f"histogram_quantile({share:g}, {rates})", f"{legend}p{share * 100:g}") for share in shares or (0.5, 0.9, 0.99)
    )


def rate(metric: str, by: str) -> tuple[tuple[str, str], ...]:
    return ((f"sum by ({by}) (rate({metric}{{@}}[$__rate_interval]))", f"{{{{{by}}}}}"),)


def mean(metric: str, by: str) -> tuple[tuple[str, str], ...]:
    over = "[$__rate_interval]"
    total, count = (f"sum by ({by}) (rate({metric}_{part}{{@}}{over}))" for part in ("sum", "count"))
    return ((f"{total} / {count}", f"{{{{{by}}}}}"),)


def per(metric: str, other: str, legend: str, selector: str = "@", of: str = "@") -> tuple[tuple[str, str], ...]:
    """The rate of one counter by that of another."""
    rates = (f"sum(rate({name}{{{where}}}[$__rate_interval]))" for name, where in ((metric, selector), (other, of)))
    return ((" / ".join(rates), legend),)
