"""Metrics to compare and scale replicas by: the work of each, and the cost of its steps."""

from admission.step_times.step_time import StepTimeModel
from gateway.replica.reader import ReplicaReader
from gateway.telemetry.metrics.registry import Family, Kind, Point, Registry

TERMS = ("step", "prefill", "decode", "decode_context", "prefill_context", "prefill_pairs", "beyond_knee")
"""The names of the coefficients of `StepTime`, in their order."""


def count_work(registry: Registry, replica: ReplicaReader, model: StepTimeModel) -> None:
    """Register the metrics of one replica."""

    def coefficients() -> list[Point]:
        return [((term,), value) for term, value in zip(TERMS, model.fitted.coefficients, strict=True)]

    registry.gauge("sluice.work", "Predicted engine time of all that runs and waits.", replica.work_seconds, "s")
    registry.gauge("sluice.replicas_wanted", "That work, over its target for one replica.", replica.replicas_wanted)
    each = Family("sluice.step_time.coefficient", Kind.GAUGE, "s", "Seconds of a unit of a step's work.", ("term",))
    registry.read(each, coefficients)
