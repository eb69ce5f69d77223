"""Every rule keeps the scheduler's books, and answers what transformers answers."""

from pathlib import Path

import pytest
from hypothesis import settings

from backend.config import Batching
from backend.llm import LLM
from backend.scheduler.batching import RULES
from backend.sizing import EngineOptions
from tests.backend import test_llm
from tests.backend.families import save_checkpoint
from tests.backend.scheduler.test_scheduler import SchedulerMachine
from tests.examples import examples
from tests.properties import test_cached_prefixes

TestEveryRule = SchedulerMachine.TestCase
TestEveryRule.settings = settings(max_examples=examples(70, at_night=3000), stateful_step_count=40, deadline=None)


def test_every_rule_that_has_a_name_can_be_chosen() -> None:
    assert RULES.keys() == set(Batching)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: save_checkpoint(family, root / family) for family in ("mistral-window", "qwen2")}


@pytest.mark.parametrize("batching", [rule for rule in Batching if rule is not Batching.CONTINUOUS])
def test_tokens_are_the_same_under_every_rule(checkpoints: dict[str, Path], batching: Batching) -> None:
    options = EngineOptions(max_num_seqs=4, max_num_batched_tokens=24, batching=batching)
    windowed = LLM(str(checkpoints["mistral-window"]), options)
    assert test_llm.outputs(windowed, test_llm.GREEDY) == test_llm.oracle("mistral-window")
    drawn = test_llm.outputs(windowed, test_llm.DRAWN)
    alone = LLM(str(checkpoints["mistral-window"]), test_llm.SHAPES["alone"])
    assert drawn == test_llm.outputs(alone, test_llm.DRAWN)
    turns = test_cached_prefixes.FIRST_TURNS
    test_cached_prefixes.ask(LLM(str(checkpoints["qwen2"]), options), "qwen2", turns[:1] + turns)
