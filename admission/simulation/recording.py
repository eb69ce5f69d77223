"""What our own event log says: the traffic, and the machine that served it.

A replay tells how long every answer became. A request that was refused or left before its end is taken to have wanted
all it declared. A deadline that its client set is kept; one for the first token that is not later than its class's
target may be the class's own, which is for the policy to say.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from admission.event_log import Entry, LogError, ReplayMismatch, make_configs, replay
from admission.simulation.arrival import Arrival
from admission.simulation.device import Device, Served, device_of
from admission.simulation.errors import TraceError
from admission.simulation.target import NO_TARGET, Target
from admission.step_time import StepTime, StepTimeModel
from admission.terms import Terms
from backend.sequence import FinishReason, Sequence


class Recording(NamedTuple):
    """`device` has the step times that were learned by the end, and how it was served on."""

    arrivals: list[Arrival]
    device: Device


def read_recording(path: Path, lines: Iterable[str]) -> Recording:
    """`lines` of all segments, from the first one on. Raises `TraceError`."""
    models: list[StepTimeModel] = []
    sequences: dict[str, Sequence] = {}
    entries: list[tuple[int, Entry]] = []

    def make_model(prior: StepTime, weight: float) -> StepTimeModel:
        models.append(StepTimeModel(prior, weight))
        return models[0]

    try:
        for line, entry in enumerate(replay(lines, sequences, make_model), 1):
            if entry[0] in ("log", "arrive", "policy"):
                entries.append((line, entry))
    except ReplayMismatch as mismatch:
        raise TraceError(path, mismatch.line, f"not reproduced: {mismatch.reason}") from None
    except LogError as error:
        raise TraceError(path, error.line, error.reason) from None
    if not entries:
        raise TraceError(path, 1, "there are no requests in this file")
    arrivals = [_arrival(line, entry, sequences.get(entry[2])) for line, entry in entries if entry[0] == "arrive"]
    return Recording(arrivals, device_of("as recorded", models[0].fitted, _served([entry for _, entry in entries])))


def _served(entries: list[Entry]) -> Served:
    """By the header, the last policy and the arrivals."""
    *_, coefficients, knee, prior_weight = header = entries[0]
    policies = [entry for entry in entries if entry[0] == "policy"]
    return Served(
        *make_configs(header),
        prior=(StepTime(tuple(coefficients), knee), prior_weight),
        terms=Terms.from_json(policies[-1][2]) if policies else None,
        targets=_targets([entry for entry in entries if entry[0] == "arrive"]),
    )


def _targets(arrived: list[Entry]) -> tuple[Target, ...]:
    """Of each class, as its last request had them. A class that refuses has a deadline for every first token."""
    by_class: dict[int, Target] = {}
    for entry in arrived:
        level, interval, _, first_by, _, target = entry[7:13]
        refused = level not in by_class or by_class[level].refuses
        by_class[level] = Target(target, interval, refused and first_by is not None and target is not None)
    return tuple(by_class.get(level, NO_TARGET) for level in range(max(by_class, default=-1) + 1))


def _arrival(line: int, entry: Entry, sequence: Sequence | None) -> Arrival:
    _, time, _, tenant, prompt, max_tokens, _, priority_class, _, _, first_by, done_by, target, *_, refusal = entry
    is_clients = first_by is not None and (target is None or first_by - time > target)
    return Arrival(
        time,
        prompt,
        _answer_length(sequence, max_tokens, refusal),
        line,
        tenant,
        priority_class,
        max_tokens,
        deadline=first_by - time if is_clients else None,
        done_within=None if done_by is None else done_by - time,
    )


def _answer_length(sequence: Sequence | None, max_tokens: int, refusal: str | None) -> int:
    ended = sequence is not None and sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    if sequence is None or refusal is not None or not ended:
        return max_tokens
    return max(1, len(sequence.output))
