"""Weights that sleep give their memory back and are the same afterwards, at the same addresses."""

from functools import partial
from pathlib import Path

import pytest
import torch

from backend.errors import ConfigError
from backend.kernels.linear import packed_linear, widened
from backend.llm import LLM
from backend.worker.sleeping import SleepingWeights, tensors_of


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def test_memory_is_given_back_and_comes_back_as_it_was(tmp_path: Path) -> None:
    large, small = torch.randn(16 * 2**20), torch.ones(16)  # 64 MiB
    held, address = large.clone(), large.data_ptr()
    weights = SleepingWeights({"layers": [partial(len, large)], "norm": small}, tmp_path)
    assert weights.is_asleep and weights.seconds > 0 and weights.num_bytes > 0.9 * large.nbytes
    asleep = resident_bytes()
    weights.wake()
    assert resident_bytes() - asleep > 0.9 * large.nbytes
    assert large.data_ptr() == address and torch.equal(large, held) and torch.equal(small, torch.ones(16))
    weights.sleep()
    weights.sleep()
    assert resident_bytes() - asleep < 0.1 * large.nbytes and not large[2**12 : -(2**12)].any()
    weights.wake()
    weights.wake()
    assert torch.equal(large, held)
    assert not [*tmp_path.iterdir()], "the file has no name"


def test_the_tensors_of_a_decoder_are_found_with_those_that_its_kernels_packed() -> None:
    decoder = LLM("embedded", device="cpu").model.runner.decoder
    found = sum(tensor.untyped_storage().nbytes() for tensor in tensors_of(decoder))
    assert found >= 4 * 2_630_000


def test_weights_that_a_product_holds_in_a_closure_sleep_and_packed_ones_are_refused(tmp_path: Path) -> None:
    weight = torch.randn(2**11, 2**11)
    assert [one.data_ptr() for one in tensors_of([widened(lambda x: x @ weight)])] == [weight.data_ptr()]
    with pytest.raises(ConfigError, match="packed do not sleep"):
        SleepingWeights([packed_linear(weight, None)], tmp_path)


def test_weights_of_another_device_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--awake-bytes"):
        SleepingWeights([torch.zeros(2**20, device="meta")], tmp_path)
