"""Memory by predicted lengths, as S³ gives it, by worked examples."""

import pytest

from admission.kv.predicted_length import PredictedLength
from backend.config import EngineConfig
from backend.scheduler.sequence import Sequence
from tests.backend.sequences import make_sequence

ENGINE = EngineConfig(num_blocks=64, max_model_len=256, block_size=4)


def asking(name: str, prompt: int = 8, most: int = 100) -> Sequence:
    return make_sequence(name, prompt=prompt, output=most)


def running(name: str, computed: int, held: int) -> Sequence:
    """One that has so many tokens, and blocks."""
    sequence = asking(name)
    sequence.num_tokens, sequence.block_table = computed, list(range(held))
    return sequence


@pytest.mark.parametrize(("predicted", "blocks"), [(1, 5), (10, 5), (11, 7), (95, 27), (300, 27)])
def test_an_answer_is_given_memory_up_to_the_end_of_its_bucket_and_no_more_than_it_declared(
    predicted: float, blocks: int
) -> None:
    gate = PredictedLength(ENGINE, lambda _: predicted)
    assert gate(asking("new"), [], blocks, 0, 0) and not gate(asking("newer"), [], blocks - 1, 0, 0)


def test_what_those_running_were_given_and_have_not_used_is_not_free() -> None:
    gate = PredictedLength(ENGINE, lambda _: 20.0)  # 28 tokens: 7 blocks
    others = [running("a", 9, 3), running("b", 9, 3)]
    assert gate(asking("new"), others, 15, 0, 0) and not gate(asking("newer"), others, 14, 0, 0)
    assert gate(asking("sharing"), others, 13, 2, 0), "it would share two of its blocks"


def test_who_outgrows_its_part_is_given_twice_as_much_and_is_known() -> None:
    gate = PredictedLength(ENGINE, lambda _: 20.0)
    other = running("a", 8 + 20, 7)
    gate(asking("new"), [other], 99, 0, 0)
    assert not gate.outgrew(other)
    other.num_tokens += 1
    assert gate.outgrew(other)
    other.block_table.append(7)
    assert gate(asking("newer"), [other], 7 + 4, 0, 0) and not gate(asking("newest"), [other], 7 + 3, 0, 0)
    assert not gate.outgrew(other)
