"""What became of requests: outcomes, refusals, latencies and the targets that they met."""

from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterator
from enum import StrEnum

from admission.outcome import Outcome
from gateway.errors import ApiError
from gateway.telemetry.metrics import buckets
from gateway.telemetry.metrics.labels import ClassNames, all_reasons, reason_of
from gateway.telemetry.metrics.registry import Registry
from gateway.telemetry.request_record import Story, Trail
from gateway.telemetry.semconv import ERROR_TYPE, GEN_AI_OPERATION_NAME, GEN_AI_PROVIDER_NAME, GEN_AI_REQUEST_MODEL

MOST_CLIENTS = 4096
MOST_EACH = 64


class RetryMemory:
    """Requests carry no name by which their next attempt could be known, so attempts are matched by key and number.

    Bounded: whoever was told longest ago is forgotten first. Moments on one clock, in seconds.
    """

    def __init__(self) -> None:
        self._due: OrderedDict[tuple[str, int], list[float]] = OrderedDict()

    def told(self, key: str, retries: int, due: float) -> None:
        """A request with this key, after so many retries, may come again from `due` on."""
        moments = self._due.setdefault((key, retries), [])
        self._due.move_to_end((key, retries))
        insort(moments, due)
        if len(moments) > MOST_EACH:
            del moments[0]
        if len(self._due) > MOST_CLIENTS:
            self._due.popitem(last=False)

    def came(self, key: str, retries: int, now: float) -> bool | None:
        """Whether an attempt after so many retries comes when it may; None: it was not told anything.

        Where several may be meant, it is the one that was due last of those that are due.
        """
        moments = self._due.get((key, retries - 1))
        if not moments:
            return None
        is_due = bisect_right(moments, now)
        del moments[max(0, is_due - 1)]
        if not moments:
            del self._due[key, retries - 1]
        return is_due > 0


class Target(StrEnum):
    TTFT = "ttft"  # of its class
    TIME_PER_OUTPUT_TOKEN = "time_per_output_token"  # of its class, or as the client asked  # noqa: S105
    DEADLINE = "deadline"  # of its own


def missed(trail: Trail) -> Iterator[Target]:
    """Of a sequence that was answered or that expired."""
    sequence, first = trail.sequence, trail.first_token
    target = sequence.first_token_target
    if target is not None and (first is None or first - trail.queued > target):
        yield Target.TTFT
    interval = mean_interval(trail)
    if sequence.token_interval is not None and interval is not None and interval > sequence.token_interval:
        yield Target.TIME_PER_OUTPUT_TOKEN
    if _is_late(first, sequence.first_token_by) or _is_late(trail.ended, sequence.done_by):
        yield Target.DEADLINE


def mean_interval(trail: Trail) -> float | None:
    """Seconds from token to token; None where there are fewer than two."""
    gaps = len(trail.sequence.output) - 1
    if trail.first_token is None or trail.ended is None or gaps < 1:
        return None
    return (trail.ended - trail.first_token) / gaps


def _is_late(moment: float | None, deadline: float | None) -> bool:
    return deadline is not None and (moment is None or moment > deadline)


PROVIDER = "sluice"
OPERATIONS = ("chat", "text_completion")
STRANGE_MODEL = "_OTHER"  # a name that a client made up makes no series
_JUDGED = (Outcome.COMPLETED, Outcome.EXPIRED)


class RequestMetrics:
    """Told of each request that has ended; `model` is the served one."""

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
            "sluice.retry_after", "The Retry-After given with refusals.", buckets.RETRY_AFTER
        ).at()
        self._retries = registry.counter(
            "sluice.retries", "Clients back after a refusal, by whether they waited as told.", ("honoured",)
        )

    def _count_targets(self, registry: Registry) -> None:
        self._goodput = registry.counter("sluice.goodput.requests", "Requests that met every target.", ("class",))
        self._misses = registry.counter("sluice.slo.misses", "Requests that missed a target.", ("class", "target"))

    def _time(self, registry: Registry) -> None:
        labels = (GEN_AI_OPERATION_NAME, GEN_AI_REQUEST_MODEL, GEN_AI_PROVIDER_NAME)
        self._durations = registry.histogram(
            "gen_ai.server.request.duration",
            "From the first byte of a request to the last of its answer.",
            buckets.REQUEST_DURATION,
            (*labels, ERROR_TYPE),
        )
        self._first_tokens = registry.histogram(
            "gen_ai.server.time_to_first_token",
            "From the first byte of a request to its first token.",
            buckets.TIME_TO_FIRST_TOKEN,
            labels,
        )
        self._intervals = registry.histogram(
            "gen_ai.server.time_per_output_token",
            "Mean time of a token after the first.",
            buckets.TIME_PER_OUTPUT_TOKEN,
            labels,
        )

    def _begin(self, classes: list[str]) -> None:
        """With all series there from the start."""
        for outcome in Outcome:
            self._requests.at(outcome, "")
        for reason in sorted(all_reasons()):
            self._refusals.at(*reason)
        for honoured in ("true", "false"):
            self._retries.at(honoured)
        for name in classes:
            self._goodput.at(name)
            for target in Target:
                self._misses.at(name, target)
        for operation in OPERATIONS:
            labels = (operation, self._model, PROVIDER)
            self._durations.at(*labels, "")
            self._first_tokens.at(*labels)
            self._intervals.at(*labels)

    def ended(self, story: Story) -> None:
        if story.operation is None or story.outcome is None or story.ended is None:
            return
        self._requests.at(story.outcome, story.service_class or "").value += 1
        self._note_retry(story)
        if story.error is not None:
            self._refused(story, story.error)
        model = self._model if story.model == self._model else STRANGE_MODEL if story.model else ""
        labels = (story.operation, model, PROVIDER)
        self._durations.at(*labels, _error_type(story)).observe(story.ended - story.began)
        if story.outcome is Outcome.COMPLETED:
            self._completed(story, labels)
        if story.outcome in _JUDGED and story.trails:
            self._judge(story)

    def _refused(self, story: Story, error: ApiError) -> None:
        self._refusals.at(*reason_of(error)).value += 1
        if error.retry_after is not None:
            self._retry_after.observe(error.retry_after)
            if story.key is not None and story.first_byte is not None:
                self._retry_memory.told(story.key, story.num_retries, story.first_byte + error.retry_after)

    def _note_retry(self, story: Story) -> None:
        if story.num_retries and story.key is not None:
            honoured = self._retry_memory.came(story.key, story.num_retries, story.began)
            if honoured is not None:
                self._retries.at("true" if honoured else "false").value += 1

    def _completed(self, story: Story, labels: tuple[str, str, str]) -> None:
        if (first := story.first_token) is not None:
            self._first_tokens.at(*labels).observe(first - story.began)
        for trail in story.trails:
            if (interval := mean_interval(trail)) is not None:
                self._intervals.at(*labels).observe(interval)

    def _judge(self, story: Story) -> None:
        name = story.service_class or ""
        misses = {target for trail in story.trails for target in missed(trail)}
        for target in misses:
            self._misses.at(name, target).value += 1
        if not misses and story.outcome is Outcome.COMPLETED:
            self._goodput.at(name).value += 1


def _error_type(story: Story) -> str:
    """Empty for what ended well."""
    if story.error is not None:
        return reason_of(story.error)[1]
    return "" if story.outcome is Outcome.COMPLETED else str(story.outcome)
