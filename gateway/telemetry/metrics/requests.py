"""What became of requests: outcomes, refusals, latencies and the targets that they met."""

from admission.outcome import Outcome
from gateway.errors import ApiError
from gateway.telemetry.metrics import buckets
from gateway.telemetry.metrics.class_names import ClassNames
from gateway.telemetry.metrics.refusal_reasons import all_reasons, reason_of
from gateway.telemetry.metrics.registry import Registry
from gateway.telemetry.metrics.retry_memory import RetryMemory
from gateway.telemetry.metrics.slo import Target, mean_interval, missed
from gateway.telemetry.semconv import ERROR_TYPE, GEN_AI_OPERATION_NAME, GEN_AI_PROVIDER_NAME, GEN_AI_REQUEST_MODEL
from gateway.telemetry.story import Story

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
