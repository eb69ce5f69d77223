"""With every choice the scheduler keeps its books, and tokens are what transformers answers."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

import labs.choices  # noqa: F401 - adds what can be chosen
from admission.core import EXPIRIES, Overload
from backend.config import Batching, KVAllocation
from backend.llm import LLM
from backend.scheduler.batching import RULES
from backend.scheduler.block_tables import POOLS
from backend.sizing import EngineOptions
from tests.backend import test_llm
from tests.backend.families import save_checkpoint
from tests.backend.scheduler.test_scheduler import SchedulerMachine
from tests.examples import examples
from tests.properties import test_cached_prefixes

TestEveryChoice = SchedulerMachine.TestCase
TestEveryChoice.settings = settings(max_examples=examples(30, at_night=3000), stateful_step_count=40, deadline=None)


def test_every_named_choice_can_be_made() -> None:
    assert (RULES.keys(), POOLS.keys(), EXPIRIES.keys()) == (set(Batching), set(KVAllocation), set(Overload))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: save_checkpoint(family, root / family) for family in ("mistral-window", "qwen2")}


@pytest.fixture(scope="module")
def drawn_alone(checkpoints: dict[str, Path]) -> object:
    alone = LLM(str(checkpoints["mistral-window"]), test_llm.SHAPES["alone"])
    return test_llm.outputs(alone, test_llm.DRAWN)


OTHERS = [
    pytest.param({"batching": rule}, id=rule, marks=() if rule is Batching.STATIC else pytest.mark.nightly)
    for rule in Batching
    if rule is not Batching.CONTINUOUS
]


@pytest.mark.parametrize("fields", [*OTHERS, pytest.param({"kv_allocation": KVAllocation.CONTIGUOUS}, id="contiguous")])
def test_tokens_are_the_same_whatever_was_chosen(
    checkpoints: dict[str, Path], drawn_alone: object, fields: dict[str, Any]
) -> None:
    options = EngineOptions(max_num_seqs=4, max_num_batched_tokens=24, **fields)
    windowed = LLM(str(checkpoints["mistral-window"]), options)
    answers = test_llm.outputs(windowed, test_llm.GREEDY)
    assert answers == test_llm.oracle("mistral-window", answers)
    assert test_llm.outputs(windowed, test_llm.DRAWN) == drawn_alone
    turns = test_cached_prefixes.FIRST_TURNS
    test_cached_prefixes.ask(LLM(str(checkpoints["qwen2"]), options), "qwen2", turns[:1] + turns)
