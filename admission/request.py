"""What a tenant asks for, complete and frozen: everything admission and the engine need to know."""

from dataclasses import dataclass

from backend.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to be continued. `prompt` plus `max_tokens` fits the context of the model."""

    id: str
    tenant: str
    prompt: list[int]
    sampling: SamplingParams
    max_tokens: int
    end_tokens: frozenset[int]
    seed: int
