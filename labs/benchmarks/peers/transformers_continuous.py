"""transformers' continuous batching: its own paged cache and scheduler, as large as it makes them itself on a GPU."""

import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from labs.benchmarks.peers.peer import Generate, Generated, answer_requests, parser
from labs.benchmarks.workload import Workload

NO_TOKEN = -1
NUM_BLOCKS = 256  # on a CPU, as the next
BATCH_TOKENS = 512


@contextmanager
def load(options: Namespace) -> Iterator[Generate]:
    on_cpu = options.device == "cpu"
    if on_cpu:
        torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype))
    limits = ContinuousBatchingConfig(
        max_requests_per_batch=options.max_num_seqs,
        num_blocks=NUM_BLOCKS if on_cpu else None,
        max_batch_tokens=BATCH_TOKENS if on_cpu else None,
        allow_block_sharing=False,
    )
    manager = model.to(options.device).init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=NO_TOKEN),
        continuous_batching_config=limits,
    )
    manager.start()

    def generate(workload: Workload) -> Generated:
        started = time.perf_counter()
        for index, (prompt, count) in enumerate(zip(workload.prompts, workload.max_tokens, strict=True)):
            manager.add_request(prompt, str(index), max_new_tokens=count, record_timestamps=True, eos_token_id=NO_TOKEN)
        times: dict[str, list[float]] = {}
        while len(times) < len(workload.prompts):
            result = manager.get_result(timeout=60)
            assert result is not None, "nothing came for a minute"
            assert result.error is None, result.error
            if result.is_finished():
                assert result.timestamps is not None
                times[result.request_id] = [at - started for at in result.timestamps]
        return Generated(time.perf_counter() - started, [times[str(index)] for index in range(len(times))], 0)

    try:
        yield generate
    finally:
        manager.stop()


if __name__ == "__main__":
    own = parser()
    own.add_argument("--device", default="cpu")
    answer_requests(own.parse_args(), load)
