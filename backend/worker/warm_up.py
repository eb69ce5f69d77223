"""The steps that an engine runs before its first request, so that no request pays for work that happens once.

Their sequence has slot 0, its context lies in block 0, and they are waited for one by one.
"""

from collections.abc import Iterator

from backend.config import EngineConfig
from backend.sampling_params import SamplingParams
from backend.scheduler.batch import Batch, NewSequence

KINDS = (
    SamplingParams(allowed_token_ids=(0, 1), bad_words=((1, 0),), logit_bias=((0, 1.0),)),
    SamplingParams(logprobs=20, prompt_logprobs=20),
    SamplingParams(temperature=1, top_p=0.9),
    SamplingParams(temperature=1, top_k=2, top_p=0.9, min_p=0.1),
    SamplingParams(temperature=1, top_k=2, presence_penalty=1),
    SamplingParams(temperature=0, presence_penalty=1, min_tokens=2, stop_token_ids=(0,)),
    SamplingParams(temperature=0),
)


def prompts(config: EngineConfig) -> Iterator[Batch]:
    """Yield the longest prompt of one step, half of it and so on: libraries load products by their sizes.

    The longest comes first, so that the others fit its memory.
    """
    length = _longest(config)
    while length > 0:
        yield _prompt(config, length, KINDS[-1])
        length //= 2


def sampling(config: EngineConfig) -> Iterator[Batch]:
    """Yield a prompt and a decode for every kind of sampling."""
    length = max(1, min(config.block_size, _longest(config)))
    for kind in KINDS:
        yield _prompt(config, length, kind)
        yield Batch(1, 1, [0], [length - 1], [1], [], [0])


def decodes(config: EngineConfig) -> Batch:
    """Return a decode for each slot, the step for which sampling takes the most memory."""
    every = list(range(config.max_num_seqs))
    return Batch(1, len(every), every, [0] * len(every), [1] * len(every), [], every)


def _longest(config: EngineConfig) -> int:
    return min(config.max_num_batched_tokens, config.max_model_len - 1)


def _prompt(config: EngineConfig, length: int, kind: SamplingParams) -> Batch:
    """Return a step of one whole prompt."""
    blocks, admitted = [0] * config.blocks_for(length), NewSequence(0, kind, 0, [0] * length, length)
    return Batch(0, 0, [0], [0], [length], [0] * length, [0], [(0, 0, blocks)], [admitted])
