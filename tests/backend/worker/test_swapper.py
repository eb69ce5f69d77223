"""Blocks go to the host and come back as they were, block by block or gathered in staging memory."""

from random import Random

import pytest
import torch

from backend.errors import ConfigError
from backend.paged_kv.kv_cache import KVCache
from backend.scheduler.batch import Batch
from backend.worker import swapper
from backend.worker.swapper import Swapper
from tests.backend.runners import MODEL
from tests.examples import examples

BLOCKS, HOST_BLOCKS = 24, 20


def make_kv(dtype: torch.dtype, block_size: int = 4) -> KVCache:
    kv = KVCache(MODEL, BLOCKS, block_size, dtype, torch.device("cpu"))
    kv.blocks.copy_(torch.randn(kv.blocks.shape))
    return kv


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_copies_are_made_in_their_order(gathers: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """First all to the host, then those back; of several to one block the last counts."""
    random = Random(1)
    kv = make_kv(dtype)
    monkeypatch.setattr(swapper, "STAGING_BYTES", 3 * kv.blocks[0].nbytes)  # longer runs are cut
    copies = Swapper(kv, HOST_BLOCKS, gathers)
    content = kv.blocks.view(torch.uint8).clone()
    host: dict[int, torch.Tensor] = {}
    for step in range(examples(30)):
        outs = list(zip(random.sample(range(BLOCKS), 8), _places(random), strict=False))
        for block, host_block in outs:
            host[host_block] = content[block].clone()
        ins = [(random.choice(list(host)), random.randrange(BLOCKS)) for _ in range(random.randint(0, 9))]
        for host_block, block in ins:
            content[block] = host[host_block]
        copies.copy(Batch(step, swap_out=outs, swap_in=ins))
        assert torch.equal(kv.blocks.view(torch.uint8), content)


def _places(random: Random) -> list[int]:
    """Some places on the host, most of them neighbours."""
    first = random.randrange(HOST_BLOCKS - 8)
    places = [place for place in range(first, first + 8) if random.random() < 0.8]
    random.shuffle(places)
    return places


@pytest.mark.parametrize("gathers", [False, True])
def test_a_copy_takes_a_measured_time_and_changes_nothing(gathers: bool) -> None:
    kv = make_kv(torch.float32)
    before = kv.blocks.clone()
    assert 0 < Swapper(kv, HOST_BLOCKS, gathers).measure() < 1
    assert torch.equal(kv.blocks, before)


class PaperCudart:
    """What is registered of the host's memory, by address, and what CUDA answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.registered: dict[int, int] = {}
        self.answer, self.calls = 0, list[str]()
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "check_error", self.check)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.calls.append("synchronize"))

    @staticmethod
    def check(answer: int) -> None:
        if answer:
            raise RuntimeError(f"out of memory ({answer})")

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:  # noqa: N802 - as CUDA has it
        self.registered[pointer] = size
        return self.answer

    def cudaHostUnregister(self, pointer: int) -> None:  # noqa: N802
        self.calls.append("unregister")
        del self.registered[pointer]


CPU = torch.device("cpu")


def test_a_gpu_is_given_exactly_the_memory_of_the_host_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own allocator would pin 64 GiB for 33."""
    cuda, memory = PaperCudart(monkeypatch), torch.empty((33, 1000), dtype=torch.int64)
    swapper._pin(memory, CPU)
    assert cuda.registered == {memory.data_ptr(): 33 * 8000}
    swapper._unpin(memory, CPU)
    assert not cuda.registered
    assert cuda.calls == ["synchronize", "unregister"], "copies may still be under way"


def test_memory_of_the_host_that_cannot_be_pinned_is_refused_by_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    PaperCudart(monkeypatch).answer = 2
    with pytest.raises(ConfigError, match=r"swap_space_bytes asks for 8\.00 MiB, and .*out of memory \(2\)"):
        swapper._pin(torch.empty(2**20, dtype=torch.int64), CPU)


def test_blocks_whose_bytes_make_up_no_words_are_copied_as_well() -> None:
    kv = make_kv(torch.float8_e4m3fn, block_size=1)
    kv.blocks = kv.blocks[..., :9].contiguous()
    kv.memory = kv.blocks.view(torch.uint8).flatten(1)
    before = kv.blocks.view(torch.uint8).clone()
    copies = Swapper(kv, HOST_BLOCKS, gathers=True)
    copies.copy(Batch(0, swap_out=[(3, 0), (5, 1)], swap_in=[(0, 7), (1, 8)]))
    after = kv.blocks.view(torch.uint8)
    assert torch.equal(after[7], before[3]) and torch.equal(after[8], before[5])
