"""An engine over a device whose steps complete when the test says so."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from queue import SimpleQueue

from admission.admission import Admission
from admission.core import CoreConfig, make_core
from backend.engine import Engine
from backend.errors import MemoryExhausted
from backend.scheduler.batch import NO_TOKEN, Batch, StepOutput
from backend.scheduler.sequence import Sequence
from backend.stream import TokenStream
from backend.worker.calibration import batch_of
from tests.backend.paper_device import PaperDevice
from tests.backend.scheduler.bench import END, make_config
from tests.backend.sequences import make_sequence


class _Step:
    def __init__(self, run: Callable[[], StepOutput]) -> None:
        self.wait = run


class SteppedExecutor:
    """Completes a step for each `allow`, or fails it; all that follow once `free` is called."""

    runs_ahead = True

    def __init__(self, block_size: int) -> None:
        self._device = PaperDevice(block_size)
        self._permits: SimpleQueue[BaseException | None] = SimpleQueue()
        self._free = threading.Event()
        self.most_launched = 0
        self.most_tokens: int | None = None  # tokens that a step may have; None: any number
        self.lost = 0
        self.broken_steps = range(0)  # in which the first row has no token
        self._launched = 0

    def allow(self, error: BaseException | None = None) -> None:
        self._permits.put(error)

    def free(self) -> None:
        self._free.set()
        self._permits.put(None)

    def launch(self, batch: Batch) -> _Step:
        if self.most_tokens is not None and sum(batch.lengths) > self.most_tokens:
            self.lost += 1
            raise MemoryExhausted(f"no memory for {sum(batch.lengths)} tokens")
        self._launched += 1
        self.most_launched = max(self.most_launched, self._launched)
        return _Step(lambda: self._wait(batch))

    def _wait(self, batch: Batch) -> StepOutput:
        error = None if self._free.is_set() and self._permits.empty() else self._permits.get()
        if error is not None:
            raise error
        self._launched -= 1
        if not batch.stores:
            return StepOutput(batch.step, [], 0.001)
        output = self._device.execute(batch)
        if batch.step in self.broken_steps:
            return replace(output, token_ids=[NO_TOKEN, *output.token_ids[1:]])
        return output


class Bench:
    def __init__(self, max_waiting: int = 100, **changes: object) -> None:
        config = make_config(**changes)
        self.executor = SteppedExecutor(config.block_size)
        core = make_core(CoreConfig(max_waiting=max_waiting), config)
        self.scheduler = core.scheduler
        self.core = core
        self.engine = Engine(
            core, self.executor, calibration_batch=lambda step: batch_of(step, config, config.num_blocks)
        )
        self.admission = Admission(self.engine, core)

    def request(self, name: str = "r", prompt: tuple[int, ...] = (5, 6, 7), max_tokens: int = 8) -> Sequence:
        return make_sequence(name, "tenant", list(prompt), max_tokens, [END])

    @contextmanager
    def admitted(self, sequence: Sequence) -> Iterator[TokenStream]:
        """Yield the tokens of a sequence, which ends with the block at the latest."""
        stream = self.engine.submit(sequence)
        try:
            yield stream
        finally:
            self.engine.finish_sequence(stream.sequence)

    async def settle(self) -> None:
        """Until the device has nothing more to do without a permit."""
        for _ in range(200):
            await asyncio.sleep(0)


@asynccontextmanager
async def running(bench: Bench) -> AsyncIterator[Bench]:
    bench.engine.start()
    try:
        yield bench
    finally:
        bench.executor.free()
        await bench.engine.shut_down()


async def drain(stream: TokenStream) -> list[int]:
    tokens: list[int] = []
    while stream.finish_reason is None:
        tokens += await stream.take()
    return tokens + stream.rest()
