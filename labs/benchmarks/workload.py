"""The workloads of engines: token ids in, a fixed number of tokens out, greedy, no end token."""

from dataclasses import dataclass, replace
from random import Random

VOCAB_SIZE, MAX_POSITIONS = 8192, 1024  # of the measured model
PROMPT_TOKENS, OUTPUT_TOKENS = 8874, 5671  # of the mixed workload
SHORT_PROMPT = 16
SPECIAL_TOKENS = 2  # at the start of the vocabulary


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that arrive all at once."""

    name: str
    prompts: list[list[int]]
    max_tokens: list[int]  # and exactly as many are generated
    detokenize: bool = True  # whether text is made of them, by engines that do

    @property
    def num_output_tokens(self) -> int:
        return sum(self.max_tokens)


def mixed(num_requests: int = 64, seed: int = 0) -> Workload:
    """Requests as chats have them: log-normal lengths, most answers short and a few long."""
    rng = Random(seed)
    prompt_total = PROMPT_TOKENS * num_requests // 64
    output_total = OUTPUT_TOKENS * num_requests // 64
    prompts = lengths(rng, num_requests, 0.8, 8, 512, prompt_total)
    outputs = lengths(rng, num_requests, 1.0, 4, MAX_POSITIONS - 512, output_total)
    return Workload("mixed", [_prompt(rng, length) for length in prompts], outputs)


def fresh(workload: Workload, run: int) -> Workload:
    """The same lengths with other tokens, which no engine has seen in another run, nor in another workload of this."""
    rng = Random(f"{workload.name} {run}")
    return replace(workload, prompts=[_prompt(rng, len(prompt)) for prompt in workload.prompts])


def token_ids_only(workload: Workload) -> Workload:
    """The same requests without detokenisation."""
    return replace(workload, name=f"{workload.name}, no text", detokenize=False)


def varied(num_requests: int = 128, mean_tokens: int = 64, seed: int = 0) -> Workload:
    """Short prompts with answers of very different lengths: what batching costs is in the decodes."""
    rng = Random(seed)
    outputs = lengths(rng, num_requests, 1.2, 4, MAX_POSITIONS // 2, mean_tokens * num_requests)
    return Workload("varied", [_prompt(rng, SHORT_PROMPT) for _ in outputs], outputs)


def decode(batch: int, num_tokens: int = 128, seed: int = 0) -> Workload:
    """`batch` short prompts with long answers of one length."""
    rng = Random(seed)
    return Workload(f"batch {batch}", [_prompt(rng, SHORT_PROMPT) for _ in range(batch)], [num_tokens] * batch)


def lengths(rng: Random, count: int, sigma: float, low: int, high: int, total: int) -> list[int]:
    """`count` log-normal numbers within [low, high] that sum to `total`."""
    weights = [rng.lognormvariate(0, sigma) for _ in range(count)]
    scale = total / sum(weights)
    values = [min(max(round(weight * scale), low), high) for weight in weights]
    while (missing := total - sum(values)) != 0:
        step = 1 if missing > 0 else -1
        index = rng.randrange(count)
        values[index] = min(max(values[index] + step, low), high)
    return values


def _prompt(rng: Random, length: int) -> list[int]:
    return [rng.randrange(SPECIAL_TOKENS, VOCAB_SIZE) for _ in range(length)]
