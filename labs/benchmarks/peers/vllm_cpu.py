"""vLLM on the CPU, in its own environment: its engine, stepped in this process and detokenising as when it serves.

With `--device cuda` it is vLLM on a GPU as `LLM` runs it unless told otherwise: its engine has a process of its own,
its step is compiled and recorded in graphs. It makes no text: a random model has no tokenizer.
"""

import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager

from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from labs.benchmarks.peers.peer import Generate, Generated, answer_requests, parser
from labs.benchmarks.workload import MAX_POSITIONS, Workload


@contextmanager
def load(options: Namespace) -> Iterator[Generate]:
    model = LLM(
        options.model,
        dtype=options.dtype,
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
        enable_prefix_caching=False,
        disable_log_stats=True,
        skip_tokenizer_init=options.device == "cuda",
    )
    engine = model.llm_engine

    def sampling(workload: Workload, count: int, kind: RequestOutputKind) -> SamplingParams:
        return SamplingParams(
            temperature=0, max_tokens=count, ignore_eos=True, output_kind=kind, detokenize=workload.detokenize
        )

    def generate_at_once(workload: Workload) -> Generated:
        started = time.perf_counter()
        prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
        asked = [sampling(workload, count, RequestOutputKind.FINAL_ONLY) for count in workload.max_tokens]
        outputs = model.generate(prompts, asked, use_tqdm=False)
        seconds = time.perf_counter() - started
        times = [[seconds] * len(output.outputs[0].token_ids) for output in outputs]
        return Generated(seconds, times, sum(output.num_cached_tokens or 0 for output in outputs))

    def generate(workload: Workload) -> Generated:
        started = time.perf_counter()
        times: list[list[float]] = [[] for _ in workload.prompts]
        cached = dict[int, int]()
        for index, (prompt, count) in enumerate(zip(workload.prompts, workload.max_tokens, strict=True)):
            params = sampling(workload, count, RequestOutputKind.DELTA)
            engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter() - started
            for output in outputs:
                index = int(output.request_id.partition("-")[0])
                times[index] += [now] * len(output.outputs[0].token_ids)
                cached[index] = output.num_cached_tokens
        return Generated(time.perf_counter() - started, times, sum(cached.values()))

    yield generate_at_once if options.device == "cuda" else generate


if __name__ == "__main__":
    own = parser()
    own.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    own.add_argument("--max-model-len", type=int, default=MAX_POSITIONS)
    answer_requests(own.parse_args(), load)
