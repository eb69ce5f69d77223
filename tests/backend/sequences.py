from collections.abc import Iterable
from typing import Any

from backend.sampling_params import SamplingParams
from backend.scheduler.sequence import PromptRequest, Sequence

END = 1  # the token that ends a sequence
OF_SEQUENCE = {"arrival", "prompt_group", "cache_root", "block_names"}  # the other fields are its request's
TOKEN = 4242  # every other, of prompts and of answers


def make_sequence(
    name: str = "s",
    tenant: str = "a",
    prompt: int | list[int] = 1,
    output: int = 1,
    ends: Iterable[int] = (END,),
    **fields: Any,
) -> Sequence:
    """Make a sequence of a prompt, or of one with that number of tokens, that may generate `output` tokens."""
    tokens = [TOKEN] * prompt if isinstance(prompt, int) else prompt
    own = {field: fields.pop(field) for field in OF_SEQUENCE & fields.keys()}
    return Sequence(PromptRequest(name, tenant, tokens, SamplingParams(), output, 0, frozenset(ends), **fields), **own)
