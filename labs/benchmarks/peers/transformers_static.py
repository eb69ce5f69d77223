"""transformers `generate`: requests in static batches, as long as their longest answer, prompts padded on the left."""

import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from labs.benchmarks.peers.peer import Generate, Generated, answer_requests, parser
from labs.benchmarks.workload import Workload, batches

PAD = 0


class Clock(BaseStreamer):
    """Notes when each step's tokens come; the prompts come first."""

    def __init__(self, started: float) -> None:
        self.started = started
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter() - self.started)

    def end(self) -> None:
        del self.times[0]


@contextmanager
def load(options: Namespace) -> Iterator[Generate]:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype))

    def generate(workload: Workload) -> Generated:
        started = time.perf_counter()
        times: list[list[float]] = []
        for batch in batches(workload, options.max_num_seqs):
            steps = _generate(model, batch, started)
            times += [steps[:count] for count in batch.max_tokens]
        return Generated(time.perf_counter() - started, times, 0)

    yield generate


def _generate(model: PreTrainedModel, batch: Workload, started: float) -> list[float]:
    longest = max(map(len, batch.prompts))
    token_ids = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in batch.prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch.prompts])
    clock = Clock(started)
    longest_answer = max(batch.max_tokens)
    config = GenerationConfig(max_new_tokens=longest_answer, do_sample=False, eos_token_id=None, pad_token_id=PAD)
    model.generate(token_ids, attention_mask=mask, generation_config=config, streamer=clock)
    return clock.times


if __name__ == "__main__":
    answer_requests(parser().parse_args(), load)
