"""What a tenant asks for, complete and frozen: everything admission and the engine need to know."""

from dataclasses import dataclass

from backend.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to be continued. `prompt` plus `max_tokens` fits the context of the model.

    `allowed_tokens` of the output are reserved so far, and generating pauses there; None: all of max_tokens.
    """

    id: str
    tenant: str
    prompt: list[int]
    sampling: SamplingParams
    max_tokens: int
    end_tokens: frozenset[int]
    seed: int
    allowed_tokens: int | None = None
    priority_class: int = 0  # 0 is the most urgent
    token_interval: float | None = None  # seconds between tokens that are promised
    first_token_target: float | None = None  # seconds in which its class is meant to have the first token
    first_token_by: float | None = None  # seconds on the engine's clock; later it is of no use
    done_by: float | None = None  # the same for its last token
    body_bytes: int = 0  # that are kept while it waits

    @property
    def tokens_to_begin_with(self) -> int:
        """Of the output."""
        return self.max_tokens if self.allowed_tokens is None else min(self.allowed_tokens, self.max_tokens)
