"""Metrics of ended requests: outcomes, refusals, latencies, and the targets met or missed."""

from bisect import bisect_right, insort
from collections import OrderedDict
from enum import StrEnum
from itertools import product
from typing import get_args

from admission.outcome import Outcome
from gateway.errors import ApiError
from gateway.openai.foreign_fields import OTHERS
from gateway.telemetry.metrics.delivery import TIME_PER_OUTPUT_TOKEN, TIME_TO_FIRST_TOKEN
from gateway.telemetry.metrics.labels import ClassNames, all_reasons, reason_of
from gateway.telemetry.metrics.registry import Registry
from gateway.telemetry.request_record import GuardrailVerdict, RequestRecord, SequenceTimeline
from quotas.policy.policy import GuardrailStage

# upper bounds of buckets in seconds
REQUEST_DURATION = tuple(round(0.01 * 2**power, 2) for power in range(14))  # to 81.92
RETRY_AFTER = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0)

MAX_CLIENTS = 4096
MAX_MOMENTS = 64  # of one key and number of retries


class RetryMemory:
    """Remembers when refused clients may retry, to count early retries.

    Requests carry no name by which a retry could be recognised, so attempts are matched by key and number of retries.
    The memory is bounded; the oldest entries are forgotten first. Moments are in seconds on one clock.
    """

    def __init__(self) -> None:
        self._due: OrderedDict[tuple[str, int], list[float]] = OrderedDict()

    def refused(self, key: str, retries: int, due: float) -> None:
        """Note that attempt number `retries` of this key's request was refused and may come again from `due` on."""
        moments = self._due.setdefault((key, retries), [])
        self._due.move_to_end((key, retries))
        insort(moments, due)
        if len(moments) > MAX_MOMENTS:
            del moments[0]
        if len(self._due) > MAX_CLIENTS:
            self._due.popitem(last=False)

    def returned(self, key: str, retries: int, now: float) -> bool | None:
        """Return whether attempt number `retries` comes at its due time or later; None if no refusal is remembered.

        Among several remembered refusals that are due, it counts as the retry of the one due last.
        """
        moments = self._due.get((key, retries - 1))
        if not moments:
            return None
        is_due = bisect_right(moments, now)
        del moments[max(0, is_due - 1)]
        if not moments:
            del self._due[key, retries - 1]
        return is_due > 0


class LatencyTarget(StrEnum):
    """The targets that a request may miss, as labels of `sluice.slo.misses`."""

    TTFT = "ttft"  # of its class
    TIME_PER_OUTPUT_TOKEN = "time_per_output_token"  # of its class, or the client's own # noqa: S105
    DEADLINE = "deadline"  # its own


def missed(timeline: SequenceTimeline) -> list[LatencyTarget]:
    """The missed targets of a sequence that was answered or expired."""
    misses, sequence, first = [], timeline.sequence, timeline.first_token
    target, promised = sequence.request.first_token_target, sequence.request.token_interval
    if target is not None and (first is None or first - timeline.queued > target):
        misses.append(LatencyTarget.TTFT)
    if promised is not None and (interval := mean_interval(timeline)) is not None and interval > promised:
        misses.append(LatencyTarget.TIME_PER_OUTPUT_TOKEN)
    if _is_late(first, sequence.request.first_token_by) or _is_late(timeline.ended, sequence.request.done_by):
        misses.append(LatencyTarget.DEADLINE)
    return misses


def mean_interval(timeline: SequenceTimeline) -> float | None:
    """Returns the mean seconds from token to token; None if there are fewer than two tokens."""
    gaps = len(timeline.sequence.output) - 1
    if timeline.first_token is None or timeline.ended is None or gaps < 1:
        return None
    return (timeline.ended - timeline.first_token) / gaps


def _is_late(moment: float | None, deadline: float | None) -> bool:
    return deadline is not None and (moment is None or moment > deadline)


PROVIDER = "sluice"
OPERATIONS = ("chat", "text_completion")
UNKNOWN_MODEL = "_OTHER"  # label of unknown model names, which clients make up


class RequestMetrics:
    """Counts each request that has ended; `model` is the served one."""

    def __init__(self, registry: Registry, model: str, classes: ClassNames) -> None:
        self._model = model
        self._retry_memory = RetryMemory()
        self._count_outcomes(registry)
        self._count_targets(registry)
        self._time(registry)
        self._begin(classes.all())

    def _count_outcomes(self, registry: Registry) -> None:
        self._requests = registry.counter(
            "sluice.requests", "Requests to generate text that have ended.", ("outcome", "class")
        )
        self._refusals = registry.counter("sluice.refusals", "Requests answered with an error.", ("reason", "code"))
        self._retry_after = registry.histogram(
            "sluice.retry_after", "The Retry-After given with refusals.", RETRY_AFTER
        ).at()
        self._retries = registry.counter(
            "sluice.retries", "Clients back after a refusal, by whether they waited as told.", ("honoured",)
        )

        self._ignored = registry.counter(
            "sluice.ignored.fields", "Fields of requests to generate text that were ignored.", ("field",)
        )

    def _count_targets(self, registry: Registry) -> None:
        self._goodput = registry.counter("sluice.goodput.requests", "Requests that met every target.", ("class",))
        self._misses = registry.counter("sluice.slo.misses", "Requests that missed a target.", ("class", "target"))

    def _time(self, registry: Registry) -> None:
        labels = ("gen_ai.operation.name", "gen_ai.request.model", "gen_ai.provider.name")
        self._durations = registry.histogram(
            "gen_ai.server.request.duration",
            "From the first byte of a request to the last of its answer.",
            REQUEST_DURATION,
            (*labels, "error.type"),
        )
        self._first_tokens = registry.histogram(
            "gen_ai.server.time_to_first_token",
            "From the first byte of a request to its first token.",
            TIME_TO_FIRST_TOKEN,
            labels,
        )
        self._intervals = registry.histogram(
            "gen_ai.server.time_per_output_token",
            "Mean time of a token after the first.",
            TIME_PER_OUTPUT_TOKEN,
            labels,
        )

        self._guardrail_calls = registry.histogram(
            "sluice.guardrail.duration", "Time of a guardrail's verdict.", TIME_TO_FIRST_TOKEN, ("stage", "verdict")
        )

    def _begin(self, classes: list[str]) -> None:
        """Create all series, so that they exist from the start."""
        for outcome in Outcome:
            self._requests.at(outcome, "")
        for reason in sorted(all_reasons()):
            self._refusals.at(*reason)
        for honoured in ("true", "false"):
            self._retries.at(honoured)
        self._ignored.at(OTHERS)
        for name in classes:
            self._goodput.at(name)
            for target in LatencyTarget:
                self._misses.at(name, target)
        for stage, verdict in product(get_args(GuardrailStage), GuardrailVerdict):
            self._guardrail_calls.at(stage, verdict)
        for operation in OPERATIONS:
            labels = (operation, self._model, PROVIDER)
            self._durations.at(*labels, "")
            self._first_tokens.at(*labels)
            self._intervals.at(*labels)

    def ended(self, record: RequestRecord) -> None:
        if record.operation is None or record.outcome is None or record.ended is None:
            return
        has_completed = record.outcome is Outcome.COMPLETED
        self._requests[record.outcome, record.service_class or ""].value += 1
        for field in record.ignored:
            self._ignored[field,].value += 1
        for call in record.guardrail_calls:
            self._guardrail_calls[call.stage, call.verdict].observe(call.ended - call.began)
        if record.num_retries:
            self._note_retry(record)
        if record.error is not None:
            self._refused(record, record.error)
        model = self._model if record.model == self._model else UNKNOWN_MODEL if record.model else ""
        labels = (record.operation, model, PROVIDER)
        error = "" if has_completed and record.error is None else _error_type(record)
        self._durations[*labels, error].observe(record.ended - record.began)
        if has_completed:
            self._completed(record, labels)
        if record.engine.timelines and (has_completed or record.outcome is Outcome.EXPIRED):
            self._judge(record, has_completed)

    def _refused(self, record: RequestRecord, error: ApiError) -> None:
        self._refusals.at(*reason_of(error)).value += 1
        if error.retry_after is not None:
            self._retry_after.observe(error.retry_after)
            if record.key is not None and record.first_byte is not None:
                self._retry_memory.refused(record.key, record.num_retries, record.first_byte + error.retry_after)

    def _note_retry(self, record: RequestRecord) -> None:
        if record.key is not None:
            honoured = self._retry_memory.returned(record.key, record.num_retries, record.began)
            if honoured is not None:
                self._retries.at("true" if honoured else "false").value += 1

    def _completed(self, record: RequestRecord, labels: tuple[str, str, str]) -> None:
        if (first := record.engine.first_token) is not None:
            self._first_tokens[labels].observe(first - record.began)
        for timeline in record.engine.timelines:
            if (interval := mean_interval(timeline)) is not None:
                self._intervals[labels].observe(interval)

    def _judge(self, record: RequestRecord, has_completed: bool) -> None:
        name = record.service_class or ""
        misses = [target for timeline in record.engine.timelines for target in missed(timeline)]
        for target in set(misses):
            self._misses[name, target].value += 1
        if has_completed and not misses:
            self._goodput[name,].value += 1


def _error_type(record: RequestRecord) -> str:
    """Returns the code of the error that a request ended with, or else its outcome."""
    return str(record.outcome) if record.error is None else reason_of(record.error)[1]
