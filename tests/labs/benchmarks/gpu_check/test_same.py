import pytest
import torch

from backend.sampling_params import SamplingParams
from backend.worker.swapper import Swapper
from labs.benchmarks.gpu_check import near_ties, same
from labs.benchmarks.gpu_check.agreement import NEAR_TIE_LOGITS
from labs.benchmarks.gpu_check.models import TINY
from labs.benchmarks.gpu_check.near_ties import Difference, Reference, Request, difference

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0)
DRAWN = SamplingParams(temperature=1, top_k=2)


class Known(Reference):
    """A reference whose logits are given."""

    def __init__(self, logits: list[float]) -> None:
        self._logits = torch.tensor([[*logits, *[-9.0] * (TINY.vocab_size - len(logits))]])
        self.config = TINY

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        return self._logits.clone()


def test_answers_may_part_where_two_tokens_are_as_likely_and_nowhere_else() -> None:
    request, near = Request([5], GREEDY, 0), Known([1.0, 1.0 - NEAR_TIE_LOGITS / 2, 0.9])
    assert difference(near, [request], [[0, 7]], [[1, 8]]) == Difference(wrong=0, near=1)
    assert difference(near, [request], [[0, 7]], [[2, 8]]) == Difference(wrong=1, near=0)
    assert difference(near, [request], [[0, 7]], [[0]]) == Difference(wrong=1, near=0)
    assert difference(near, [request], [[0, 7]], [[0, 7]]) == Difference(wrong=0, near=0)


def test_penalties_count_for_what_is_as_likely() -> None:
    penalised = Request([5], SamplingParams(temperature=0, presence_penalty=0.5), 0)
    assert Known([1.0, 0.5]).could_choose(penalised, [0], 1), "0 is in the output, and both have 0.5 by now"
    assert not Known([1.0, 0.4]).could_choose(penalised, [0], 1)


def test_a_draw_may_part_where_one_token_ends_and_the_next_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    request, even = Request([5], DRAWN, 0), Known([1.0, 1.0])
    drawn = next(token for token in (0, 1) if even.could_choose(request, [], token))
    assert not even.could_choose(request, [], 1 - drawn)
    monkeypatch.setattr(near_ties, "NEAR_TIE_LOGITS", 0.999)
    assert even.could_choose(request, [], 1 - drawn)


@pytest.fixture
def swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only way, because all of them take some seconds."""
    ways = [way for way in same.ways(same.SMALL) if way.name == "swapped"]
    monkeypatch.setattr(same, "ways", lambda plan: ways)


@pytest.mark.usefixtures("swapped")
def test_answers_through_swapped_blocks_equal_each_request_alone() -> None:
    found = {finding.what: finding for finding in same.check(CPU)}
    assert found["answers that differ, swapped"].value == 0
    assert found["swapped: blocks copied back"].met


@pytest.mark.usefixtures("swapped")
def test_blocks_that_come_back_as_others_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Swapper, "copy", lambda self, batch: None)
    found = {finding.what: finding for finding in same.check(CPU)}
    assert found["answers that differ, swapped"].met is False
