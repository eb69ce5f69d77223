"""Whole steps on tensors without memory: nothing reads back from the device, and what a step launches is written down.

A tensor without memory cannot be read, so that a step which waited for its device would fail here. What is launched is
compared with `step_launches.json`, which `python -m tests.properties.test_step_launches` writes anew.
"""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from backend.config import EngineConfig
from backend.sampling_params import SamplingParams
from backend.scheduler.batch import Batch, NewSequence
from backend.worker import warm_up
from tests.backend.runners import MODEL

pytest.importorskip("triton")
pytest.importorskip("labs")

from labs.benchmarks.gpu_check import paper_gpu as paper

GOLDEN = Path(__file__).parent / "step_launches.json"
CONFIG = EngineConfig(
    num_blocks=40, max_model_len=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=24, prefill_chunk=24
)
FUSED = replace(MODEL, hidden_size=128, intermediate_size=96, head_dim=32)  # widths that kernels of few rows take
GREEDY, DRAWN = SamplingParams(temperature=0), SamplingParams()
FILTERED = SamplingParams(top_k=50, top_p=0.9)
PENALISED = SamplingParams(top_p=0.9, presence_penalty=1)
RULED = SamplingParams(allowed_token_ids=(1, 2), bad_words=((3, 2),), logit_bias=((1, 5.0),))
SCORED = SamplingParams(logprobs=3, prompt_logprobs=3)
KINDS = dict(greedy=GREEDY, drawn=DRAWN, filtered=FILTERED, penalised=PENALISED, ruled=RULED, scored=SCORED)


class Launches(TorchDispatchMode):
    """Counts kernels by name: Triton's, and torch's operations that are neither views nor fresh memory.

    A copy between host and device for which the host waits is a fault: so are those that torch makes of a number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket).removeprefix("aten.")
        if not func.is_view and "empty" not in name and name != "detach":
            self.counts[f"torch {name}"] += 1
        result = func(*args, **(kwargs or {}))
        every = tree_leaves((args, kwargs, result))
        places = {one.device for one in every if isinstance(one, torch.Tensor)}
        assert len(places) < 2 or any(one is True for one in every), f"the host waits for {name}"  # not non_blocking
        return result


@contextmanager
def recorded() -> Iterator[Launches]:
    """What is launched meanwhile on an H100 that is not there."""
    launches = Launches()

    def record(kernel: Any, args: object, constants: object) -> None:
        launches.counts.update([f"triton {kernel.__name__.strip('_')}"])

    with paper.paper_gpu(90, record), launches:
        yield launches


def prompts(kind: SamplingParams, step: int, slots: list[int]) -> Batch:
    """A prompt of 5 tokens in each slot."""
    admitted = [NewSequence(slot, kind, slot, [1] * 5, 5) for slot in slots]
    count = len(slots)
    new_blocks = [(slot, 0, [2 * slot, 2 * slot + 1]) for slot in slots]
    return Batch(step, 0, slots, [0] * count, [5] * count, [1] * 5 * count, list(range(count)), new_blocks, admitted)


def decodes(step: int, slots: list[int]) -> Batch:
    return Batch(step, len(slots), slots, [5] * len(slots), [1] * len(slots), [], list(range(len(slots))))


def beside(step: int) -> Batch:
    """Decodes of slots 0 and 1, and a prompt in slot 2."""
    prompt = prompts(DRAWN, step, [2])
    return Batch(
        step, 2, [0, 1, 2], [5, 5, 0], [1, 1, 5], prompt.token_ids, [0, 1, 2], prompt.new_blocks, prompt.admitted
    )


def steps() -> dict[str, dict[str, int]]:
    """What each kind of step launches, with graphs played as they were recorded and without."""
    runner = paper.paper_runner(FUSED, CONFIG, torch.bfloat16)
    with recorded() as launches:
        for step in range(2):  # the first takes memory that stays
            launches.counts.clear()
            runner.launch(decodes(step, [0, 1]))
            runner.completed()
    found = {"decodes, fused": dict(sorted(launches.counts.items()))}
    for how in ("launched one by one", "in a graph"):
        runner = paper.paper_runner(MODEL, CONFIG, torch.bfloat16)
        with recorded() as launches:
            if how == "in a graph":
                runner.graphs = runner._make_graphs()
            for what, kind in KINDS.items():
                launches.counts.clear()
                runner.launch(prompts(kind, 0, [0, 1]))
                runner.completed()
                if what == "scored":
                    found[f"prompts, {what}, {how}"] = dict(sorted(launches.counts.items()))
                for name, batch in (("decodes", decodes(1, [0, 1])), ("decodes and a prompt", beside(2))):
                    launches.counts.clear()
                    runner.launch(batch)
                    runner.completed()
                    if what != "greedy" or name == "decodes":
                        found[f"{name}, {what}, {how}"] = dict(sorted(launches.counts.items()))
    return found


def test_a_step_launches_what_is_written_down_and_reads_nothing_back() -> None:
    assert steps() == json.loads(GOLDEN.read_text())


def test_no_kind_of_sampling_has_the_host_wait() -> None:
    runner = paper.paper_runner(MODEL, CONFIG, torch.bfloat16)
    with recorded() as launches:
        for batch in warm_up.sampling(CONFIG):
            runner.launch(batch)
            runner.completed()
    assert launches.counts["torch index_put_"], "tokens that end a text too early were forbidden"


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(steps(), indent=1) + "\n")
