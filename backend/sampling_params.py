"""The sampling parameters of a request, checked when made: how its tokens are drawn and when its text ends."""

from dataclasses import dataclass

from backend.errors import InvalidRequest
from backend.grammar import Grammar

MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_BIASED = 300  # tokens, OpenAI's limit
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 64  # of each text
MAX_LOGPROBS = 20  # of the most likely tokens at a position, OpenAI's limit
GREEDY_BELOW_TEMPERATURE = 1e-5
_INT64 = 2**63


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters of one request. Every value is checked here, so later code need not check it again.

    Raises `InvalidRequest` naming the field, its value and the allowed range.
    """

    max_tokens: int | None = None  # None: all that the context leaves
    min_tokens: int = 0  # output tokens before which end and stop tokens are suppressed
    temperature: float = 1.0  # below GREEDY_BELOW_TEMPERATURE: greedy
    top_p: float = 1.0  # 1: off; 0: greedy
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0  # 0: off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None  # None, or -1 as in vLLM and llama.cpp: the engine draws one
    stop: tuple[str, ...] = ()  # the text ends before the first of these
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()  # token ids, and the biases of their logits; ascending
    allowed_token_ids: tuple[int, ...] | None = None  # no others are drawn; ascending
    bad_words: tuple[tuple[int, ...], ...] = ()  # token ids of texts, none of which may be completed
    logprobs: int | None = None  # the number of most likely tokens beside the drawn one; None: no log probabilities
    prompt_logprobs: int | None = None  # the same for the tokens of the prompt
    grammar: Grammar | None = None  # that the answer has to match

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, _INT64 - 1)
        _check_int("min_tokens", self.min_tokens, 0, _INT64 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}", "min_tokens")
        _check_number("temperature", self.temperature, 0, 2)
        _check_number("top_p", self.top_p, 0, 1)
        _check_int("top_k", self.top_k, -1, _INT64 - 1)
        _check_number("min_p", self.min_p, 0, 1)
        _check_number("presence_penalty", self.presence_penalty, -2, 2)
        _check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100)
        if self.seed is not None:
            _check_int("seed", self.seed, -_INT64, _INT64 - 1)
            if self.seed == -1:
                object.__setattr__(self, "seed", None)
        _check_stop(self.stop)
        _check_stop_token_ids(self.stop_token_ids)
        _check_bias(self.logit_bias)
        if self.allowed_token_ids is not None:
            _check_allowed(self.allowed_token_ids)
        _check_bad_words(self.bad_words)
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _check_int(name, count, 0, MAX_LOGPROBS)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW_TEMPERATURE or self.top_p == 0

    @property
    def penalised(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def depends_on_output(self) -> bool:
        """True if more than the model makes a token depend on the tokens drawn before it."""
        return self.penalised or bool(self.bad_words) or self.grammar is not None


def _check_number(param: str, value: object, low: float, high: float) -> None:
    """Refuse a number out of range. NaN and the infinities fail the comparison like any other."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidRequest(f"{param} must be between {low} and {high}, got {_shown(value)}", param)


def _check_int(param: str, value: object, low: int, high: int) -> None:
    if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
        return
    is_open = high == _INT64 - 1 and low > -_INT64 and not (isinstance(value, int) and value > high)
    bounds = f"at least {low}" if is_open else f"between {low} and {high}"
    raise InvalidRequest(f"{param} must be an integer {bounds}, got {_shown(value)}", param)


def _check_stop(stop: tuple[str, ...]) -> None:
    if not isinstance(stop, tuple):
        raise InvalidRequest(f"stop must be a tuple of strings, got {_shown(stop)}", "stop")
    if len(stop) > MAX_STOPS:
        raise InvalidRequest(f"stop may hold at most {MAX_STOPS} strings, got {len(stop)}", "stop")
    for text in stop:
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS:
            raise InvalidRequest(f"each stop must be 1 to {MAX_STOP_CHARS} characters, got {_shown(text)}", "stop")


def _check_stop_token_ids(token_ids: tuple[int, ...]) -> None:
    if not isinstance(token_ids, tuple):
        raise InvalidRequest(f"stop_token_ids must be a tuple of integers, got {_shown(token_ids)}", "stop_token_ids")
    if len(token_ids) > MAX_STOPS:
        raise InvalidRequest(f"stop_token_ids may hold at most {MAX_STOPS} ids, got {len(token_ids)}", "stop_token_ids")
    for token_id in token_ids:
        _check_int("stop_token_ids", token_id, 0, 2**31 - 1)


def _check_bias(bias: tuple[tuple[int, float], ...]) -> None:
    if len(bias) > MAX_BIASED:
        raise InvalidRequest(f"logit_bias may hold at most {MAX_BIASED} tokens, got {len(bias)}", "logit_bias")
    for token_id, value in bias:
        _check_int("logit_bias", token_id, 0, 2**31 - 1)
        _check_number("logit_bias", value, -100, 100)


def _check_allowed(token_ids: tuple[int, ...]) -> None:
    if not token_ids:
        raise InvalidRequest("allowed_token_ids must hold at least one token id", "allowed_token_ids")
    for token_id in (min(token_ids), max(token_ids)):
        _check_int("allowed_token_ids", token_id, 0, 2**31 - 1)


def _check_bad_words(words: tuple[tuple[int, ...], ...]) -> None:
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(f"bad_words may hold at most {MAX_BAD_WORDS} texts, got {len(words)}", "bad_words")
    for token_ids in words:
        if not 1 <= len(token_ids) <= MAX_BAD_WORD_TOKENS:
            raise InvalidRequest(
                f"each of bad_words must be 1 to {MAX_BAD_WORD_TOKENS} tokens, got {len(token_ids)}", "bad_words"
            )


def _shown(value: object) -> str:
    """Return a short form of any value of a client, huge integers and long strings included."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str) and len(value) > 40:
        return f"a string of {len(value)} characters"
    if isinstance(value, int | float | str | None):
        return repr(value)
    return f"a {type(value).__name__}"
