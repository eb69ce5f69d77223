import torch

from backend.kernels.reference import ReferenceOps, cast_to_cache, paged_attention
from backend.kernels.torch_ops import TorchOps
from backend.sampling_params import SamplingParams
from tests.backend.kernels.ragged import Heads, ragged
from tests.backend.runners import generate, make_runner


def test_plain_torch_and_the_reference_read_the_same_from_8_bits() -> None:
    prompts, sampling = [[5, 9, 2], [7] * 11], [SamplingParams(temperature=0, max_tokens=6)] * 2
    runners = [make_runner(ops, kv_dtype=torch.float8_e4m3fn) for ops in (TorchOps(), ReferenceOps())]
    first, second = (generate(runner, prompts, sampling) for runner in runners)
    assert first == second
    assert torch.equal(*(runner.kv.blocks.float() for runner in runners))


def test_what_is_before_a_window_is_not_read() -> None:
    heads = Heads(4, 2, 8)
    batch = ragged([(1, 37), (5, 21), (3, 3)], heads, 4)
    query = torch.randn((9, heads.queries, heads.dim))
    arguments = batch.k_cache, batch.v_cache, batch.step, 0.3, 6
    expected = paged_attention(query, *arguments)
    for row, first_seen in enumerate((31 // 4, 11 // 4)):
        batch.pool[batch.step.block_tables[row, :first_seen].long()] = torch.nan
    assert torch.equal(paged_attention(query, *arguments), expected)


def test_numbers_beyond_8_bits_are_stored_as_the_largest() -> None:
    stored = cast_to_cache(torch.tensor([1e4, -500.0, 0.1]), torch.float8_e4m3fn)
    assert stored.float().tolist() == [448.0, -448.0, 0.1015625]
