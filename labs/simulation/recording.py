"""Reads an event log: the traffic, and the machine that served it.

A replay shows the length of every answer. A request that was refused or left before its end is assumed to have wanted
all that it declared; without a declaration, half of its tenant's answers were as long. Requests refused by limits never
reached the core: they are read from their `request` entries, as are the tier, the key and the deadlines of every
request. A request refused unread is assumed to be like its tenant's last read request.

A log without `request` entries is of a core without a gateway. Its requests ask for the classes that served them, and a
deadline for the first token that is not later than its class's target may be the class's own.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low
from typing import NamedTuple

from admission.event_logs.event_log import Entry, LogError, ReplayMismatch, make_configs, replay
from admission.event_logs.names import asked_of, read_scheduling_policy
from admission.event_logs.numbers import in_seconds
from admission.request import AssumedRequests, JudgedPrompt, JudgedRequest
from admission.step_times.step_time import StepTime, StepTimeModel, StepWork
from backend.scheduler.sequence import FinishReason, Sequence
from labs.simulation.arrival import NO_TARGET, Arrival, ClassTarget
from labs.simulation.contents import Content
from labs.simulation.device import Device, Served, device_of
from labs.simulation.errors import TraceError
from labs.simulation.host import HostTimes


class TraceFacts(NamedTuple):
    """Facts of a trace beside its requests' times and lengths."""

    has_tiers: bool = False
    has_keys: bool = False
    has_body_bytes: bool = False
    model: str | None = None  # of all requests
    began: float | None = None  # Unix seconds of the first arrival
    has_contents: bool = False  # shared contents of prompts
    is_recorded: bool = False  # by a gateway, which kept tenants' contents apart
    columns: tuple[tuple[str, str], ...] = ()  # of a table: the fields and their headings
    unread: tuple[str, ...] = ()  # the others


NO_FACTS = TraceFacts()
AS_RECORDED = ""  # the scope of a log's contents
FIT_TOLERANCE_SHARE = 0.01  # of the time: tolerance of a fit


class Recording(NamedTuple):
    """A recording. `device` reproduces the measured total time, and knows the served settings."""

    arrivals: list[Arrival]
    device: Device
    facts: TraceFacts


@dataclass(slots=True)
class _Log:
    """The entries of traffic, by kind, with their lines."""

    header: Entry = field(default_factory=list)
    gateway: Entry | None = None
    policy: Entry | None = None  # the last
    arrived: dict[str, tuple[int, Entry]] = field(default_factory=dict)  # by id of the sequence
    asked: list[tuple[int, float, JudgedRequest]] = field(default_factory=list)
    host: HostTimes = field(default_factory=HostTimes)

    @property
    def block_size(self) -> int:
        return int(self.header[2]["block_size"])

    def add(self, line: int, entry: Entry) -> None:
        self.host.add(entry)
        match entry[0]:
            case "log":
                self.header = entry
            case "gateway":
                self.gateway = entry
            case "policy":
                self.policy = entry
            case "arrive":
                self.arrived[entry[2]] = line, entry
            case "request":
                self.asked.append((line, in_seconds(entry[1]), asked_of(entry)))


class _Timed:
    """The sums over all steps that a step-time model has observed."""

    def __init__(self, prior: StepTime, prior_weight: float) -> None:
        self.model = StepTimeModel(prior, prior_weight, observed=self._observed)
        self._seconds = 0.0
        self._work = StepWork()
        self._num_tokens_beyond = 0  # the knee, of each step
        self._read_shares = 0.0  # of the weights, of each step

    def _observed(self, work: StepWork, seconds: float) -> None:
        tokens, fitted = work.prefill_tokens + work.decode_tokens, self.model.fitted
        self._num_tokens_beyond += max(0, tokens - fitted.knee)
        self._read_shares += fitted.read_share(tokens)
        self._work += work
        self._seconds += seconds

    @property
    def as_measured(self) -> StepTime:
        """The step times as learned, made longer by as much as all steps together took longer: the model leaves stalls
        out, and clients did not.
        """
        fitted = self.model.fitted
        fixed, prefill, decode, decode_context, prefill_context, pairs, beyond = fitted.coefficients
        linear = StepTime((0.0, prefill, decode, decode_context, prefill_context, pairs, 0.0))
        predicted = fixed * self._read_shares + linear.seconds(self._work) + beyond * self._num_tokens_beyond
        longer = self._seconds / predicted if predicted > 0 else 1.0
        if abs(longer - 1) < FIT_TOLERANCE_SHARE:
            return fitted
        times = tuple(longer * rate for rate in fitted.coefficients)
        return StepTime(times, fitted.knee, fitted.expert_reads)  # type: ignore[arg-type]  # as many as before


def read_recording(path: Path, lines: Iterable[str]) -> Recording:
    """Reads a recording from the `lines` of all segments, from the first one on. Raises `TraceError`."""
    timed: list[_Timed] = []
    sequences: dict[str, Sequence] = {}
    log = _Log()

    def make_model(prior: StepTime, weight: float) -> StepTimeModel:
        timed.append(_Timed(prior, weight))
        return timed[-1].model

    try:
        for line, entry in enumerate(replay(lines, sequences, make_model), 1):
            log.add(line, entry)
    except ReplayMismatch as mismatch:
        raise TraceError(path, mismatch.line, f"not reproduced: {mismatch.reason}") from None
    except LogError as error:
        raise TraceError(path, error.line, error.reason) from None
    if not timed:
        raise TraceError(path, 1, "there are no requests in this file")
    arrivals = _requests(log, sequences) if log.asked else _sequences(log, sequences)
    block_bytes = log.gateway[4] if log.gateway else None
    device = device_of("as recorded", timed[0].as_measured, _served(log), block_bytes, log.host.fitted)
    return Recording(arrivals, device, _facts(log))


def _facts(log: _Log) -> TraceFacts:
    if log.gateway is None or not log.asked:
        return NO_FACTS
    _, then, unix, model, _ = log.gateway
    return TraceFacts(True, True, True, model, unix + log.asked[0][1] - in_seconds(then))


def _served(log: _Log) -> Served:
    """The settings, from the header, the last policy and the arrivals."""
    *_, coefficients, knee, prior_weight = log.header
    core, engine = make_configs(log.header)
    return Served(
        core,
        engine,
        prior=(StepTime(tuple(coefficients), knee, engine.expert_reads_of(0)), prior_weight),
        scheduling_policy=read_scheduling_policy(log.policy[2]) if log.policy else None,
        targets=_targets([entry for _, entry in log.arrived.values()]),
    )


def _targets(arrived: list[Entry]) -> tuple[ClassTarget, ...]:
    """Each class's targets at its last request. A class that refuses late requests sets every first token a
    deadline.
    """
    by_class: dict[int, ClassTarget] = {}
    for entry in arrived:
        level, interval, _, first_by, _, target = entry[7:13]
        refused = level not in by_class or by_class[level].refuses
        by_class[level] = ClassTarget(target, interval, refused and first_by is not None and target is not None)
    return tuple(by_class.get(level, NO_TARGET) for level in range(max(by_class, default=-1) + 1))


def _requests(log: _Log, sequences: dict[str, Sequence]) -> list[Arrival]:
    """Return every HTTP request, with any outcome."""
    lengths = _answer_lengths(sequences)
    return [_request(line, time, asked, log, sequences, lengths) for line, time, asked in _all_read(log)]


def _all_read(log: _Log) -> Iterator[tuple[int, float, JudgedRequest]]:
    """Yields all requests, except unread refusals of unknown content."""
    as_if_read = AssumedRequests()
    for line, time, asked in log.asked:
        if (read := as_if_read.of(asked)) is not None:
            yield line, time, read


def _request(
    line: int, time: float, asked: JudgedRequest, log: _Log, sequences: dict[str, Sequence], lengths: dict[str, int]
) -> Arrival:
    names = [f"{asked.id}-{index}" for index in range(len(asked.prompts))]
    usual = lengths.get(asked.tenant)
    prompts = [
        (prompt.prompt_tokens, _length(sequences.get(name), log.arrived.get(name), prompt, usual), prompt.most)
        for name, prompt in zip(names, asked.prompts, strict=True)
    ]
    contents = [_content(sequences.get(name), log.block_size) for name in names]
    first, *_ = asked.prompts
    served = log.arrived.get(names[0])
    return Arrival(
        time,
        *prompts[0][:2],
        session=line,
        tenant=asked.tenant,
        priority_class=served[1][7] if served else 0,
        max_tokens=first.most,
        deadline=asked.first_token,
        done_within=asked.last_token,
        interval=asked.interval,
        key=asked.key,
        service_tier=asked.service_tier,
        is_declared=first.is_declared,
        body_bytes=asked.body_bytes,
        refused_by=asked.refusal,
        more_prompts=tuple(prompts[1:]),
        content=contents[0],
        expects=_expected(sequences.get(names[0])),
        more_contents=tuple(contents[1:]),
        num_answers=asked.num_answers,
    )


def _length(
    sequence: Sequence | None, arrived: tuple[int, Entry] | None, asked: JudgedPrompt, usual: int | None
) -> int:
    if _has_ended(sequence, arrived):
        assert sequence is not None
        return max(1, len(sequence.output))
    return asked.most if asked.is_declared or usual is None else min(asked.most, usual)


def _answer_lengths(sequences: dict[str, Sequence]) -> dict[str, int]:
    """The median length of each tenant's complete answers."""
    lengths: defaultdict[str, list[int]] = defaultdict(list)
    for sequence in sequences.values():
        if sequence.finish_reason in _ENDED:
            lengths[sequence.tenant].append(max(1, len(sequence.output)))
    return {tenant: median_low(found) for tenant, found in lengths.items()}


def _sequences(log: _Log, sequences: dict[str, Sequence]) -> list[Arrival]:
    """Each sequence of a core without a gateway."""
    return [_arrival(line, entry, sequences.get(name), log.block_size) for name, (line, entry) in log.arrived.items()]


def _content(sequence: Sequence | None, block_size: int) -> Content | None:
    """The content of a sequence, by the ordinals of its blocks: sequences of different scopes have none in common."""
    if sequence is None or not sequence.block_names:
        return None
    return Content(tuple(name.ordinal for name in sequence.block_names), block_size, scope=AS_RECORDED)


def _expected(sequence: Sequence | None) -> float | None:
    return None if sequence is None else sequence.request.expects_followup


def _arrival(line: int, entry: Entry, sequence: Sequence | None, block_size: int) -> Arrival:
    _, arrived, _, tenant, prompt, max_tokens, _, priority_class, _, size, first_by, done_by, target, *_ = entry
    time = in_seconds(arrived)
    is_clients = first_by is not None and (target is None or first_by - time > target)
    ended = _has_ended(sequence, (line, entry))
    return Arrival(
        time,
        prompt,
        max(1, len(sequence.output)) if ended and sequence is not None else max_tokens,
        line,
        tenant,
        priority_class,
        max_tokens,
        deadline=first_by - time if is_clients else None,
        done_within=None if done_by is None else done_by - time,
        asked_class=priority_class,
        body_bytes=size,
        content=_content(sequence, block_size),
        expects=_expected(sequence),
    )


REFUSAL_INDEX = 15  # index in an `arrive` entry
_ENDED = (FinishReason.STOP, FinishReason.LENGTH)


def _has_ended(sequence: Sequence | None, arrived: tuple[int, Entry] | None) -> bool:
    """True if the length of the sequence's answer is known."""
    return (
        sequence is not None
        and arrived is not None
        and arrived[1][REFUSAL_INDEX] is None
        and sequence.finish_reason in _ENDED
    )
