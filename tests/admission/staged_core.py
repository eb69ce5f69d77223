"""A recorded core runs on a virtual clock, over a device that only takes time and draws the tokens it is told to."""

from random import Random
from typing import Any

from admission.core import PRIOR_STEP_TIME, CoreConfig
from admission.event_logs.event_log import make_logged_core
from admission.ledger import work_of
from admission.outcome import AdmissionRefused
from admission.step_times.idle_calibration import work_of_shape
from admission.step_times.step_time import StepTime, StepTimeModel
from backend.calibration_steps import CalibrationStep
from backend.config import EngineConfig
from backend.paged_kv.block_names import BlockName, BlockNames
from backend.scheduler.scheduled_step import ScheduledStep
from backend.scheduler.sequence import Sequence
from tests.admission.clocked_core import ClockedCore
from tests.backend.sequences import make_sequence

TRUE = StepTime((4e-3, 1e-4, 3e-5, 1e-6, 1e-7, 1e-8, 1e-4), 24)  # not the prior: what is predicted has to be learned
START = 1000.0  # seconds of the engine's clock
SMALL = {
    "num_blocks": 40,
    "max_model_len": 64,
    "block_size": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "prefill_chunk": 16,
}


def true_seconds(step: ScheduledStep, random: Random) -> float:
    """Returns how long a step takes, which varies by a quarter."""
    return TRUE.seconds(work_of(step)) * random.uniform(0.8, 1.25)


class StagedCore(ClockedCore):
    """Events are methods; the lines of its log are in `lines`. The same calls give the same lines on any machine."""

    def __init__(self, config: CoreConfig, seed: int = 0, prior: StepTimeModel | None = None, **engine: Any) -> None:
        """`engine`: fields of an `EngineConfig` that differ from those of `SMALL`."""
        self.lines: list[str] = []
        self.engine = EngineConfig(**(SMALL | engine))
        core, self.log = make_logged_core(
            config, self.engine, prior or StepTimeModel(PRIOR_STEP_TIME), self.lines.append
        )
        super().__init__(core, self._took, START)
        self.random = Random(seed)
        self._names = BlockNames(b"staged", self.engine.block_size)
        self.scheduler.name_blocks_by(self._names)

    def arrive(
        self,
        name: str,
        prompt: int | list[int] = 8,
        output: int = 8,
        tenant: str = "a",
        may_have: int | None = None,
        **fields: Any,
    ) -> Sequence:
        """A prompt of given tokens shares blocks with others of its tenant, a prompt given by its length shares none.

        `may_have`: the tokens of the answer that it may generate at first. Raises `AdmissionRefused`.
        """
        length = prompt if isinstance(prompt, int) else len(prompt)
        most = min(output, self.engine.max_model_len - length)
        sequence = make_sequence(name, tenant, prompt, most, **fields)
        if not isinstance(prompt, int):
            sequence.cache_root = self._names.root(tenant)
            self._names.name(sequence, length // self.engine.block_size)
        if may_have is not None:
            sequence.limit_to(may_have)
        return self.add(sequence)

    def refused(self, name: str, prompt: int = 8, **fields: Any) -> AdmissionRefused:
        """Returns why a newcomer is refused, which must not be let in."""
        try:
            self.arrive(name, prompt, **fields)
        except AdmissionRefused as refusal:
            return refusal
        raise AssertionError(f"{name} was let in")

    def allow(self, tenant: str, blocks: int | None) -> None:
        self.core.allow(tenant, blocks, self.now)

    def limit_cache(self, tenant: str, floor: int, ceiling: int | None) -> None:
        self.core.limit_cache(tenant, floor, ceiling, self.now)

    def pin_prefixes(self, tenant: str, *prompts: list[int]) -> None:
        """What these prompts begin with stays cached for the tenant, in whole blocks."""
        names: dict[BlockName, None] = {}
        for prompt in prompts:
            one = make_sequence("", tenant, prompt, 1, cache_root=self._names.root(tenant))
            self._names.name(one, len(prompt) // self.engine.block_size)
            names |= dict.fromkeys(one.block_names)
        self.core.pin_prefixes(tenant, names, self.now)

    def extend(self, sequence: Sequence, tokens: int) -> None:
        self.core.raise_token_limit(sequence, tokens, self.now)

    def run(self) -> list[str]:
        """Serve until nothing can run any more; returns the lines of the log."""
        self.drain()
        return self.lines

    def took(self, step: CalibrationStep) -> float:
        """Returns how long a calibration step takes."""
        return TRUE.seconds(work_of_shape(step)) * self.random.uniform(0.8, 1.25)

    def _took(self, step: ScheduledStep) -> float:
        return true_seconds(step, self.random)
