"""A scheduler and a paper device, driven step by step or to the end."""

from collections import deque
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from backend.config import EngineConfig
from backend.paged_kv.block_names import BlockName, BlockNames
from backend.paged_kv.block_pool import PagedPool
from backend.scheduler.batch import Batch
from backend.scheduler.hooks import DefaultHooks
from backend.scheduler.retention import Retention
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import FinishReason, Sequence, SequenceStatus
from backend.scheduler.waiting_queue import FirstComeFirstServed
from tests.backend.paper_device import PaperDevices, continuation, logprobs_of
from tests.backend.sequences import make_sequence

END = 3
MOST_STEPS = 2000  # that any work takes here


def make_config(**changes: object) -> EngineConfig:
    fields: dict[str, object] = dict(
        num_blocks=16, max_model_len=40, block_size=4, max_num_seqs=4, max_num_batched_tokens=8, prefill_chunk=6
    )
    return EngineConfig(**(fields | changes))  # type: ignore[arg-type]


def expected(sequence: Sequence) -> list[int]:
    return continuation(sequence.request.prompt, sequence.request.max_tokens, END)


class Bench:
    """Sequences arrive in the order in which they are added, and the device computes what it is told to."""

    def __init__(
        self,
        retention: Retention | None = None,
        make_hooks: Callable[[EngineConfig], DefaultHooks] = DefaultHooks,
        models: int = 1,
        **changes: object,
    ) -> None:
        self.config = make_config(**changes)
        self.hooks = hooks = make_hooks(self.config)
        hooks.retention = retention or hooks.retention
        self.scheduler = Scheduler(self.config, FirstComeFirstServed(), hooks)
        self.now = 0.0
        self.names = BlockNames(b"secret", self.config.block_size)
        self.scheduler.name_blocks_by(self.names)
        self.device = PaperDevices(self.config.block_size, models, self.config)
        self.in_flight: deque[Batch] = deque()
        self.batches: list[Batch] = []
        self._arrivals = count()

    def add(self, prompt_length: int, max_tokens: int, tenant: str = "t", **fields: Any) -> Sequence:
        """A sequence whose prompt is like no other."""
        n = next(self._arrivals)
        return self._add(n, [n + 10 + i for i in range(prompt_length)], max_tokens, tenant, **fields)

    def say(
        self, prompt: list[int], max_tokens: int, tenant: str = "t", salt: str | None = None, **fields: Any
    ) -> Sequence:
        """A sequence that shares what it begins with, with those of the same salt: by default of its tenant."""
        fields.setdefault("cache_root", self.names.root(salt or tenant))
        return self._add(next(self._arrivals), prompt, max_tokens, tenant, **fields)

    def arrival(self, n: int) -> float:
        """The time at which the nth sequence arrives."""
        return float(n)

    def _add(
        self,
        n: int,
        prompt: list[int],
        max_tokens: int,
        tenant: str,
        is_looked_up: bool = False,
        ends: Iterable[int] = (END,),
        **fields: Any,
    ) -> Sequence:
        sequence = make_sequence(f"s{n}", tenant, prompt, max_tokens, ends, arrival=self.arrival(n), **fields)
        sequence.logprobs = []
        sequence.prompt_logprobs = None if sequence.cache_root else []
        self.names.name(sequence, len(prompt) // self.config.block_size)
        if is_looked_up:
            self.scheduler.look_up(sequence, self.now)
        self.scheduler.add(sequence, self.now)
        return sequence

    def pin_prefixes(self, tenant: str, *prompts: list[int], salt: str | None = None, now: float | None = None) -> None:
        """What these prompts begin with stays cached for the tenant, in whole blocks."""
        names: dict[BlockName, None] = {}
        for prompt in prompts:
            one = make_sequence("", tenant, prompt, 1, [END], cache_root=self.names.root(salt or tenant))
            self.names.name(one, len(prompt) // self.config.block_size)
            names |= dict.fromkeys(one.block_names)
        self.now = self.now if now is None else now
        self.scheduler.kv_manager.pin_prefixes(tenant, names, self.now)

    def plan(self, now: float | None = None) -> Batch | None:
        self.now = self.now if now is None else now
        batch = self.scheduler.schedule(self.now)
        if batch is not None:
            self.in_flight.append(batch)
            self.batches.append(batch)
            self.device.launch(batch)
        return batch

    def complete(self, now: float | None = None, forced: int = 0) -> None:
        """Complete the oldest step; after the tokens of every other of its rows `forced` ones follow."""
        self.now = self.now if now is None else now
        batch = self.in_flight.popleft()
        output = self.device.execute(batch)
        if forced:
            output.forced = self.device.forced(batch, forced)
        self.scheduler.update_from_output(output, self.now)
        self.scheduler.check_integrity()
        if isinstance(self.scheduler.kv_manager.pool, PagedPool):
            leaving = {block for block, _ in self.scheduler.kv_manager.blocks.swapping._out}
            leaving |= {block for batch in self.in_flight for block, _ in batch.swap_out}
            self.device.poison(set(self.scheduler.kv_manager.pool.free_blocks) - leaving)

    def lose(self, now: float | None = None, copied: int = 0) -> None:
        """Lose the steps in flight; `copied` of their copies were made."""
        self.now = self.now if now is None else now
        self.in_flight.clear()
        self.device.lose(copied)
        self.scheduler.rollback(self.now)
        self.scheduler.check_integrity()

    def step(self) -> None:
        while self.plan():
            pass
        if not self.in_flight and (wakes_at := self.scheduler.wakes_at) is not None:
            self.plan(wakes_at)
        if self.in_flight:
            self.complete()
        self.scheduler.check_integrity()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def drain(self) -> None:
        for _ in range(MOST_STEPS):
            if not self.scheduler.has_work:
                assert (
                    self.scheduler.kv_manager.pool.num_free + self.scheduler.kv_manager.cache.num_idle
                    == self.config.num_blocks
                )
                return
            self.step()
        pytest.fail("the work did not end")


class BenchMachine(RuleBasedStateMachine):
    """Any interleaving of what happens to a bench; uncancelled sequences have their whole answer in the end."""

    def begin(self, **changes: object) -> None:
        self.bench = Bench(**changes)
        self.sequences: list[Sequence] = []
        self.cancelled: dict[Sequence, int] = {}  # tokens that it had by then

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        if sequence.status is not SequenceStatus.FINISHED:
            self.cancelled[sequence] = len(sequence.output)
        self.bench.scheduler.finish_sequence(sequence, FinishReason.CANCELLED, self.bench.now)

    @invariant()
    def blocks_and_slots_are_conserved(self) -> None:
        if hasattr(self, "bench"):
            self.bench.scheduler.check_integrity()

    @invariant()
    def log_probabilities_are_those_of_the_tokens(self) -> None:
        for sequence in self.sequences if hasattr(self, "bench") else ():
            assert sequence.logprobs == list(map(logprobs_of, sequence.output))
            scored = sequence.prompt_logprobs
            if scored is not None:
                assert scored == list(map(logprobs_of, sequence.request.prompt[1 : len(scored) + 1]))
                assert len(scored) == sequence.num_prompt_tokens - 1 or not sequence.output

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.bench.drain()
            self.log_probabilities_are_those_of_the_tokens()
            self.check_ends()
            self.bench.scheduler.kv_manager.cache.clear()
            assert self.bench.scheduler.kv_manager.pool.num_free == self.bench.config.num_blocks

    def check_ends(self) -> None:
        for sequence in self.sequences:
            if sequence in self.cancelled:
                assert len(sequence.output) == self.cancelled[sequence], "a token came after the cancellation"
            elif sequence.finish_reason is not FinishReason.PREEMPTED:
                assert sequence.output == expected(sequence)


class LossyMachine(BenchMachine):
    """The same on a device that may have no memory for a step."""

    @precondition(lambda self: self.bench.in_flight)
    @rule()
    def complete(self) -> None:
        self.bench.complete()

    @rule(count=st.integers(1, 8))
    def copy(self, count: int) -> None:
        """Copies run whenever the device likes."""
        self.bench.device.copy(count)

    @precondition(lambda self: self.bench.in_flight)
    @rule(copied=st.integers(0, 8))
    def lose(self, copied: int) -> None:
        self.bench.lose(copied=copied)
