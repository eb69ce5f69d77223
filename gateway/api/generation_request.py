"""A request to generate text, joined with its tenant's policy and its client's headers."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from math import inf

from backend.sampling_params import MAX_LOGPROBS, SamplingParams
from gateway.api.dialects import Dialect, Prompt
from gateway.api.engine_request import ClientDeadlines, EngineRequest
from gateway.api.frontend import AdapterCard, ServedModel
from gateway.api.guardrail import Guardrail
from gateway.errors import ContextLengthExceeded, Unsatisfiable, context_exceeded
from gateway.openai.requests import GenerationRequest
from gateway.replica.fleet_secret import UNKNOWN, Beginnings
from gateway.tenants.effective_policy import EffectivePolicy
from quotas.policy.policy import ClassPolicy
from quotas.reservation import Attempt

MAX_ANSWER_LOGPROBS = 2**20  # log probabilities in one answer: some 60 MB while it is made, and 40 MB of JSON


@dataclass(slots=True)
class GenerationParams:
    """A request with its policy and its client's headers. `arrived` is in seconds of the engine's clock."""

    request: GenerationRequest
    dialect: Dialect
    policy: EffectivePolicy
    service_class: ClassPolicy
    deadlines: ClientDeadlines
    expects_followup: float | None  # seconds after the answer
    arrived: float
    num_bytes: int
    beginnings: Beginnings = UNKNOWN
    attempt: Attempt | None = None
    on_admitted: Callable[[], Awaitable[None]] | None = None  # called once the engine has taken the request
    guardrail: Guardrail | None = None  # of the answers
    clamped_to: int | None = None  # tokens of an answer whose client asked for more than the context leaves
    adapter: AdapterCard | None = None  # None: the model alone
    session: str | None = None

    def engine_request(self, name: str, prompts: list[Prompt], model: ServedModel) -> EngineRequest:
        """The engine's part of the request, with the response id `name`. Each of `prompts` has as many consecutive
        entries as the client wants answers to it. Raises `Unsatisfiable`.
        """
        max_tokens = [self._max_tokens(len(prompt.token_ids), model) for prompt in prompts]
        if not self.request.is_plain:
            self._check_told(prompts, max_tokens, model)
        return EngineRequest(
            id=name,
            tenant=self.policy.name,
            key=self.policy.key,
            prompts=[prompt.token_ids for prompt in prompts],
            max_tokens=max_tokens,
            sampling=self._owned(self.request.sampling),
            service_tier=self.request.service_tier,
            service_class=self.service_class.name,
            priority_class=self.service_class.level,
            token_interval=self._token_interval(),
            first_token_target=self.service_class.ttft,
            first_token_by=self._first_token_by(),
            done_by=self.arrived + self.deadlines.last_token if self.deadlines.last_token < inf else None,
            deadlines=self.deadlines,
            body_bytes=self.num_bytes,
            streams=self.request.stream,
            may_stop=bool(self.request.sampling.stop) or self.request.is_prompt_alone or self.request.may_end,
            cache_salt=self.request.cache_salt,
            num_answers=self.request.num_answers,
            expects_followup=self._followup(model),
            beginnings=self.beginnings,
            attempt=self.attempt,
            adapter=None if self.adapter is None else self.adapter.name,
            model=model.name,
            usage_row=self.policy.usage_row(
                model.name if self.adapter is None else self.adapter.name,
                self.service_class.name,
                self.request.user,
                self.request.metadata or {},
                self.session,
            ),
        )

    def _followup(self, model: ServedModel) -> float | None:
        """Seconds until a next turn: as declared, or as tools take, or as the client wishes its prompt to be cached."""
        of_tools = model.tool_followup if self.request.offers_tools else None
        return self.expects_followup or of_tools or self.request.cached_for

    def _owned(self, sampling: SamplingParams) -> SamplingParams:
        """The parameters with the grammar marked as the tenant's, since compiled grammars are not shared among tenants,
        and without a clamped length.
        """
        grammar = sampling.grammar
        if self.clamped_to is not None:
            sampling = replace(sampling, max_tokens=None)
        return sampling if grammar is None else replace(sampling, grammar=replace(grammar, owner=self.policy.name))

    def _max_tokens(self, num_prompt_tokens: int, model: ServedModel) -> int:
        """The client's limit, or the default within the rest of the context and of the tenant's KV memory. Raises
        `Unsatisfiable`.
        """
        policy, dialect, context = self.policy, self.dialect, model.limits.max_model_len
        available = context - num_prompt_tokens
        if available < 1:
            raise context_exceeded(num_prompt_tokens, context, dialect.prompt_param)
        asked, field = self.request.sampling.max_tokens, self.request.length_field
        is_clamped = asked is not None and asked > available
        if is_clamped and not model.clamps_max_tokens:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {context} tokens, but {num_prompt_tokens} tokens of prompt "
                f"and {asked} of {field} were requested; lower {field} to {available} or shorten the prompt.",
                field,
            )
        if is_clamped:
            asked = None  # a clamped limit bounds nothing and predicts no length
        of_adapter = 0 if self.adapter is None else self.adapter.kv_blocks
        kv_tokens = policy.kv_tokens(model.kv_shape, of_adapter)
        if kv_tokens is not None:
            param = field if asked else dialect.prompt_param
            policy.check_kv(num_prompt_tokens + (asked or 1), model.kv_shape, param, of_adapter)
            available = min(available, kv_tokens - num_prompt_tokens)
        if is_clamped:
            self.clamped_to = min(available, self.clamped_to or available)
        default = model.default_max_tokens or dialect.default_max_tokens or available
        max_tokens = available if is_clamped else asked or min(available, default)
        if (min_tokens := self.request.sampling.min_tokens) > max_tokens:
            raise Unsatisfiable(
                f"min_tokens is {min_tokens}, but this answer may have {max_tokens} tokens at most: "
                "lower min_tokens, shorten the prompt, or set max_tokens.",
                "min_tokens",
            )
        return max_tokens

    def _check_told(self, prompts: list[Prompt], max_tokens: list[int], model: ServedModel) -> None:
        """Raise `Unsatisfiable` for an answer with too many log probabilities: `MAX_ANSWER_LOGPROBS`, or a context of
        them. All of them are in memory until the last token, in several forms.
        """
        sampling, request = self.request.sampling, self.request
        count, most = 0, max(MAX_ANSWER_LOGPROBS, (MAX_LOGPROBS + 1) * model.limits.max_model_len)
        if sampling.logprobs is not None:
            count += (sampling.logprobs + 1) * sum(max_tokens)
        if sampling.prompt_logprobs is not None:
            count += (sampling.prompt_logprobs + 1) * sum(len(prompt.token_ids) for prompt in prompts)
        if count > most:
            param = request.top_field if request.details.top else request.answers_field
            raise Unsatisfiable(
                f"This request may take {count} log probabilities, and one answer may hold {most}: lower {param} or "
                f"{request.length_field}, or send fewer prompts at once.",
                param,
            )

    def _first_token_by(self) -> float | None:
        """The deadline of the first token: the client's, or the target of a class that refuses late requests; None:
        there is none.
        """
        seconds, target = self.deadlines.first_token, self.service_class.ttft
        if self.service_class.when_late == "refuse" and target is not None:
            seconds = min(seconds, target)
        return self.arrived + seconds if seconds < inf else None

    def _token_interval(self) -> float | None:
        """The promised seconds between two tokens, by the class or the client; None if neither sets any."""
        promised = self.service_class.time_per_output_token
        if self.deadlines.interval == inf:
            return promised
        return min(self.deadlines.interval, promised or inf)
