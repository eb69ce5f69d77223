"""Refusals and failures of constrained answers, part of the tree in `gateway.errors`."""

from admission.outcome import Outcome
from gateway.errors import ApiError, BadRequest


class InvalidGrammar(BadRequest):
    """The requested grammar is malformed, or has parts that cannot be enforced. `param` is the field."""

    code = "invalid_grammar"

    @property
    def discreet_message(self) -> str:
        return "The grammar cannot be enforced."


class TooComplexGrammar(InvalidGrammar):
    """Compiling it exceeds its time limit, or following it did, after the first tokens perhaps."""

    code = "grammar_too_complex"

    @property
    def discreet_message(self) -> str:
        return "The grammar is too complex."


class NoTokenAllowed(ApiError):
    """The answer cannot go on: its grammar and its other bans together allow no token."""

    status = 400
    code = "no_token_allowed"
    outcome = Outcome.FAILED

    def __init__(
        self,
        message: str = "The answer could not go on: its grammar allows only tokens that the request's other fields "
        "forbid, or takes too much work to follow. Simplify the grammar, or lift stop_token_ids, bad_words, logit_bias "
        "and allowed_token_ids.",
    ) -> None:
        super().__init__(message)


class GrammarsUnavailable(ApiError):
    """No grammar can be compiled at present."""

    status = 503
    type = "service_unavailable_error"
    code = "grammars_unavailable"
    outcome = Outcome.FAILED
    dropped_reason = "grammars"
    should_retry = True


class GrammarsExceeded(ApiError):
    """Too many grammars of the tenant wait to be compiled, or are in use."""

    status = 429
    type = "rate_limit_error"
    code = "grammars_exceeded"
    outcome = Outcome.REFUSED
    dropped_reason = "grammars"
