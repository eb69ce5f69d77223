import torch

from backend.kernels.reference import ReferenceOps, cast_to_cache
from backend.kernels.torch_ops import TorchOps
from backend.sampling_params import SamplingParams
from tests.backend.runners import generate, make_runner


def test_plain_torch_and_the_reference_read_the_same_from_8_bits() -> None:
    prompts, sampling = [[5, 9, 2], [7] * 11], [SamplingParams(temperature=0, max_tokens=6)] * 2
    runners = [make_runner(ops, kv_dtype=torch.float8_e4m3fn) for ops in (TorchOps(), ReferenceOps())]
    first, second = (generate(runner, prompts, sampling) for runner in runners)
    assert first == second
    assert torch.equal(*(runner.kv.blocks.float() for runner in runners))


def test_numbers_beyond_8_bits_are_stored_as_the_largest() -> None:
    stored = cast_to_cache(torch.tensor([1e4, -500.0, 0.1]), torch.float8_e4m3fn)
    assert stored.float().tolist() == [448.0, -448.0, 0.1015625]
