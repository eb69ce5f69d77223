from dataclasses import replace

import pytest

from backend.kernels.triton_ops import TritonOps
from backend.sampling_params import SamplingParams
from tests.backend.runners import CONFIG, EagerGraphStream, generate, make_runner

PROMPTS = [[5, 9, 2], [7] * 6, [40]]
SAMPLING = [
    SamplingParams(temperature=0, max_tokens=3, repetition_penalty=1.5),
    SamplingParams(max_tokens=3, top_k=20, min_tokens=2, stop_token_ids=(11,)),
    SamplingParams(max_tokens=4),
]


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_padded_steps_sampled_on_the_device_give_the_tokens_of_the_runner_in_torch() -> None:
    config = replace(CONFIG, max_num_seqs=4)
    expected = generate(make_runner(config=config), PROMPTS, SAMPLING)
    stream = EagerGraphStream()
    runner = make_runner(TritonOps(), stream, config)
    runner.warm_up()
    assert generate(runner, PROMPTS, SAMPLING, at_once=1) == expected
    assert all(block.isfinite().all() for block in runner.kv.blocks[: config.num_blocks])
    assert sum(graph.replays for graph in stream.graphs if not graph.shape.num_prompts) >= 3
    assert any(graph.replays for graph in stream.graphs if graph.shape.num_prompts and graph.shape.num_decodes)
