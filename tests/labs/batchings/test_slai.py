"""Critical decodes, prompts, other decodes: the order of SLAI's paper, by worked examples."""

from collections.abc import Callable

import pytest

from backend.config import Batching
from backend.scheduler.batch import Batch
from backend.scheduler.sequence import Sequence
from labs.batchings.slai import DEFAULT_TOKEN_INTERVAL_S, OFFSET_STEPS
from tests.backend.scheduler.bench import Bench

STEP = 0.01  # seconds that each takes


class TimedBench(Bench):
    """Each step takes `STEP`, and the next is planned when it is done."""

    def __init__(self, **changes: object) -> None:
        fields = dict(
            batching=Batching.SLAI, steps_in_flight=1, num_blocks=64, max_num_batched_tokens=6, prefill_chunk=6
        )
        super().__init__(**(fields | changes))

    def timed_step(self) -> Batch:
        batch = self.plan()
        assert batch is not None
        self.complete(self.now + STEP)
        return batch


def decoding(bench: TimedBench, count: int = 3) -> list[Sequence]:
    """Sequences that have their first tokens, with long answers."""
    sequences = [bench.add(2, 30) for _ in range(count)]
    bench.timed_step()
    return sequences


def with_elapsed(bench: TimedBench, monkeypatch: pytest.MonkeyPatch) -> None:
    execute: Callable[..., object] = bench.device.execute

    def timed(batch: Batch) -> object:
        output = execute(batch)
        output.elapsed = STEP  # type: ignore[attr-defined]
        return output

    monkeypatch.setattr(bench.device, "execute", timed)


def test_a_prompt_takes_the_whole_step_until_decodes_are_critical(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = TimedBench()
    with_elapsed(bench, monkeypatch)
    decoding(bench)
    bench.add(38, 2)
    batches = [bench.timed_step() for _ in range(6)]
    assert [(batch.num_decodes, sum(batch.lengths)) for batch in batches] == [(0, 6)] * 6
    rest = bench.timed_step()
    assert (rest.num_decodes, rest.lengths) == (3, [1, 1, 1, 2]), "what the prompt leaves is the decodes'"


def test_a_decode_is_in_the_step_from_its_last_schedulable_time_on(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = TimedBench(max_model_len=200, num_blocks=128)
    with_elapsed(bench, monkeypatch)
    decoding(bench)
    bench.add(190, 2)
    last = round((DEFAULT_TOKEN_INTERVAL_S - OFFSET_STEPS * STEP) / STEP)
    waited = 0
    while (batch := bench.timed_step()).num_decodes == 0:
        waited += 1
    assert waited == pytest.approx(last, abs=1)
    assert (batch.num_decodes, sum(batch.lengths)) == (3, 6), "and the prompt has what they leave"
