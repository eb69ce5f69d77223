"""What a running gateway says of itself at one moment, by its metrics and its admin API."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.doctor.samples import Samples
from quotas.units import duration

PATHS = ("overview", "tenants", "queue", "requests", "policy")
"""Below /admin/v1/: what a snapshot is made of, beside the metrics."""

SECONDS = 3.0
"""Between two snapshots: some hundred steps, and longer than any step that is well."""

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Targets:
    """Of one class, in seconds; None: it has none."""

    ttft: float | None
    time_per_output_token: float | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`at` in seconds of a clock that both snapshots share."""

    at: float
    samples: Samples
    overview: Json
    tenants: tuple[Json, ...]
    waiting: tuple[Json, ...]  # rows of the queue
    live: tuple[Json, ...]  # requests being served
    targets: Mapping[str, Targets]  # by class

    @classmethod
    def of(cls, at: float, metrics: str, answers: Mapping[str, Json]) -> "Snapshot":
        """`answers` by the names in `PATHS`."""
        classes = answers["policy"]["effective"]["classes"]
        return cls(
            at,
            Samples.parse(metrics),
            answers["overview"],
            tuple(answers["tenants"]["tenants"]),
            tuple(answers["queue"]["waiting"]),
            tuple(answers["requests"]["live"]),
            {name: _targets(fields) for name, fields in classes.items()},
        )

    @property
    def engine(self) -> Json:
        engine: Json = self.overview["engine"]
        return engine

    @property
    def kv_share(self) -> float:
        """Of the KV blocks, that are used."""
        return float(self.engine["kv_blocks_used"] / max(1, self.engine["kv_blocks"]))


def _targets(fields: Json) -> Targets:
    return Targets(_seconds(fields.get("ttft")), _seconds(fields.get("time_per_output_token")))


def _seconds(text: str | None) -> float | None:
    return None if text is None else duration(text)
