"""A model on ranks that are processes: what it answers, and what becomes of it when one of them ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from backend import LLM, SamplingParams
from backend.config import EngineOptions
from backend.errors import ConfigError, DeviceError, ModelLoadError
from backend.grammar import Grammar, GrammarKind
from backend.loader import load_model
from backend.parallel.messages import RankSetup
from backend.parallel.rank_processes import RankProcesses
from backend.parallel.runners import LeadingRunner
from tests.backend.parallel.ranks import taking_turns
from tests.gateway.server_process import eventually

CHATS = [[{"role": "user", "content": text}] for text in ("Count from 3 to 12.", "Say the alphabet.", "What is 4 + 5?")]
SAMPLING = [
    SamplingParams(temperature=0, max_tokens=24, logprobs=3),
    SamplingParams(seed=5, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0, grammar=Grammar(GrammarKind.REGEX, "[0-9]{2}"), max_tokens=24),
]
TIGHT = EngineOptions(max_num_seqs=4, kv_memory_bytes=2**20)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with taking_turns():
        yield LLM("embedded", TIGHT, device="cpu", tensor_parallel=2)


def others(llm: LLM) -> RankProcesses:
    runner = llm.model.runner
    assert isinstance(runner, LeadingRunner)
    return runner.others


def test_answers_and_log_probabilities_are_those_of_one_rank(llm: LLM) -> None:
    alone = LLM("embedded", TIGHT, device="cpu")
    asking = [*SAMPLING[:2], SAMPLING[2]]
    found, expected = (one.generate(CHATS, asking, progress=False) for one in (llm, alone))
    assert [completion.text for completion in found] == [completion.text for completion in expected]
    for pair in zip(found[0].logprobs or [], expected[0].logprobs or [], strict=True):
        assert pair[0].logprobs == pytest.approx(pair[1].logprobs, abs=1e-4)
    prompts = [SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)]
    scored, expected_scores = (one.generate(CHATS[:1], prompts, progress=False)[0] for one in (llm, alone))
    assert [one.logprob for one in scored.prompt_logprobs or []] == pytest.approx(
        [one.logprob for one in expected_scores.prompt_logprobs or []], abs=1e-4
    )


def test_limits_and_sizes_are_those_of_the_whole_model(llm: LLM) -> None:
    alone = load_model("embedded", TIGHT, device="cpu")
    assert llm.model.engine_config == alone.engine_config
    assert llm.model.kv_bytes == alone.kv_bytes
    assert llm.model.num_parameters == alone.num_parameters


def test_when_a_rank_ends_the_next_step_says_which_and_how(llm: LLM) -> None:
    os.kill(others(llm).pids[0], signal.SIGKILL)
    with pytest.raises(DeviceError, match="rank 1 of the model has ended: it was killed by signal 9"):
        llm.generate(CHATS, SAMPLING, progress=False)


PROGRAM = """
import os, sys
from backend import LLM
from tests.backend.parallel.test_loading import TIGHT, others
print(*others(LLM("embedded", TIGHT, device="cpu", tensor_parallel=2)).pids, flush=True)
os.kill(os.getpid(), 9)
"""


def test_ranks_end_with_a_process_that_is_killed() -> None:
    killed = subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    pids = killed.stdout.split()
    assert len(pids) == 1
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_a_model_with_too_little_to_divide_starts_nothing() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel 7: the model has 6 attention heads"):
        load_model("embedded", TIGHT, device="cpu", tensor_parallel=7)


def test_a_load_that_fails_leaves_the_process_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise ModelLoadError("the disk is gone")

    monkeypatch.setattr("backend.parallel.loading.load_weights", full)
    monkeypatch.setattr("backend.parallel.loading.RankProcesses", Mock())
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with pytest.raises(ModelLoadError, match="the disk is gone"):
            load_model("embedded", TIGHT, device="cpu", tensor_parallel=2)
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_a_load_error_of_another_rank_is_raised(tmp_path: Path) -> None:
    setup = RankSetup(1, 2, tmp_path / "meeting", tmp_path, TIGHT, "float32", torch.device("cpu"), "auto", 1)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        RankProcesses([setup]).await_answers()
