"""Rank 0 leads and the others follow, through all plans of a scheduler: all draw what one rank alone draws."""

from collections import deque
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import pytest

from backend.errors import DeviceError
from backend.llm import OfflineEngine
from backend.parallel.messages import decoded, encoded
from backend.parallel.runners import LeadingRunner
from backend.sampling_params import SamplingParams
from backend.scheduler.batch import Batch, NewSequence
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import FinishReason, PromptRequest, Sequence
from backend.scheduler.waiting_queue import FirstComeFirstServed
from backend.worker.model_runner import ModelRunner
from tests.backend.parallel.ranks import lead, taking_turns
from tests.backend.runners import CONFIG, EagerGraphStream, generate, make_runner
from tests.examples import examples

PROMPTS = [[(7 * n + k) % 97 for k in range(1 + 5 * n % 17)] for n in range(14)]
KINDS = [
    SamplingParams(temperature=0, max_tokens=9),
    SamplingParams(max_tokens=14),
    SamplingParams(temperature=0.8, top_p=0.8, top_k=20, max_tokens=6, repetition_penalty=1.4),
]
SAMPLING = [KINDS[n % len(KINDS)] for n in range(len(PROMPTS))]
SCARCE = replace(CONFIG, num_blocks=16)


def served(runner: ModelRunner, seed: int) -> tuple[list[list[int]], int]:
    """The tokens of sequences that come at random, some of which are cancelled, and how often one was preempted."""
    random = Random(seed)
    scheduler = Scheduler(runner.config, FirstComeFirstServed())
    engine = OfflineEngine(scheduler, runner)
    coming = deque(
        Sequence(PromptRequest(str(n), "", prompt, sampling, sampling.max_tokens or 8, n, frozenset()), float(n))
        for n, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLING, strict=True))
    )
    sequences = list(coming)
    while coming or scheduler.has_work:
        for _ in range(random.randint(0, 5)):
            if coming:
                scheduler.add(coming.popleft())
        if random.random() < 0.05 and (running := list(scheduler.running.values())):
            scheduler.finish_sequence(random.choice(running), FinishReason.CANCELLED)
        if scheduler.has_work:
            engine.step()
    assert scheduler.kv_manager.pool.num_free == runner.config.num_blocks
    return [sequence.output for sequence in sequences], scheduler.counters.preemptions


def test_cancelled_and_preempted_sequences_end_as_on_one_rank(tmp_path: Path) -> None:
    most = 0
    for seed in range(examples(2)):
        with taking_turns():
            expected, preemptions = served(make_runner(config=SCARCE), seed)
        most = max(most, preemptions)
        folder = tmp_path / str(seed)
        folder.mkdir()
        assert lead(2, folder, SCARCE, partial(served, seed=seed)) == (expected, preemptions)
    assert most, "nothing was preempted"


def test_graphs_are_recorded_and_replayed_by_all_ranks_together(tmp_path: Path) -> None:
    def run(runner: LeadingRunner) -> list[list[int]]:
        runner.warm_up()
        assert runner.graphs is not None
        return generate(runner, PROMPTS, SAMPLING, at_once=3)

    config = replace(CONFIG, max_num_seqs=3, max_num_batched_tokens=7, prefill_chunk=7)
    with taking_turns():
        expected = generate(make_runner(config=config), PROMPTS, SAMPLING, at_once=3)
    assert lead(2, tmp_path, config, run, EagerGraphStream) == expected


def test_a_step_that_was_interrupted_halfway_is_the_last(tmp_path: Path) -> None:
    def run(runner: LeadingRunner) -> str:
        launched = runner.launch(prompt_step(0))
        runner.decoder.forward = None  # type: ignore[method-assign, assignment]
        with pytest.raises(TypeError):
            launched.wait()
        with pytest.raises(DeviceError) as caught:
            runner.launch(prompt_step(1)).wait()
        return str(caught.value)

    assert "out of step" in lead(1, tmp_path, CONFIG, run)


def prompt_step(number: int) -> Batch:
    return Batch(number, 0, [0], [0], [1], [1], [0], [(0, 0, [0])], [NewSequence(0, KINDS[0], 0, [1], 1)])


def test_a_message_is_the_batch_that_it_was() -> None:
    batch = prompt_step(3)
    batch.padding, batch.forks, batch.stores = [(0, 0, 3)], [(0, 2)], False
    assert decoded(encoded(batch)) == batch
