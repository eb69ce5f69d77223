"""The spare class beside other work: it fills the device, and the others hardly notice."""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from random import Random

import pytest

from admission.core import CoreConfig, make_core
from admission.ledger import work_of
from admission.spare import SPARE_SHARE, SPARE_STEP_S
from admission.step_times.step_time import StepTime, StepTimeModel
from backend.config import EngineConfig
from backend.scheduler.sequence import SPARE_CLASS, Sequence, SequenceStatus
from tests.admission.clocked_core import ClockedCore
from tests.backend.sequences import make_sequence
from tests.examples import examples

TIMES = StepTime((0.010, 5e-5, 1e-4, 1e-7, 1e-7, 1e-9, 0.0))  # a GPU's: ten milliseconds, and little for each token
SPARE_TENANT = "night"


class Device(ClockedCore):
    """A device whose steps take what is predicted, with the times of each sequence's tokens."""

    def __init__(self, backlog: int, **changes: int) -> None:
        fields = dict(num_blocks=400, max_model_len=512, block_size=16, max_num_seqs=16, max_num_batched_tokens=256)
        config = EngineConfig(**(fields | changes))  # type: ignore[arg-type]
        core = make_core(CoreConfig(calibration=False), config, StepTimeModel(TIMES, prior_weight=1e9))
        super().__init__(core, lambda step: TIMES.seconds(work_of(step)))
        self.times: defaultdict[str, list[float]] = defaultdict(list)
        self.busy = 0.0
        self._backlog, self._names, self._random = backlog, 0, Random(1)

    def more_spare(self) -> None:
        """Let the backlog of the spare class be as long as it was."""
        while sum(one.is_spare for one in self.unfinished) < self._backlog:
            self._names += 1
            prompt, output = self._random.randint(1, 200), self._random.randint(1, 120)
            tenant = SPARE_TENANT if self._names % 2 else "a"
            self.arrive(f"spare-{self._names}", prompt, output, SPARE_CLASS, tenant)

    @property
    def unfinished(self) -> list[Sequence]:
        return [one for one in self._all if one.status is not SequenceStatus.FINISHED]

    def arrive(self, name: str, prompt: int, output: int, level: int, tenant: str) -> Sequence:
        sequence = self.add(make_sequence(name, tenant, prompt, output, (), priority_class=level))
        self._all = [*getattr(self, "_all", []), sequence]
        return sequence

    def complete(self, ended: Collection[str] = ()) -> None:
        step = self.launched[0]
        super().complete(ended)
        self.busy += self.elapsed
        for sequence in step.sampled:
            self.times[sequence.id].append(self.now)
        self._all = self.unfinished
        self.scheduler.check_integrity()


@dataclass
class Work:
    at: float
    prompt: int
    output: int
    level: int
    tenant: str


def works(seed: int, load: float) -> list[Work]:
    random, at, found = Random(seed), 0.0, []
    for _ in range(40):
        at += random.expovariate(load)
        prompt, output = random.randint(1, 300), random.randint(1, 60)
        found.append(Work(at, prompt, output, random.randrange(2), random.choice("abc")))
    return found


def served(device: Device, asked: list[Work]) -> dict[str, Sequence]:
    """Serve work to its end, with the backlog of the device beside it."""
    found: dict[str, Sequence] = {}
    waiting = list(enumerate(asked))
    device._all = []
    while waiting or any(not one.is_spare for one in device.unfinished):
        device.more_spare()
        while waiting and waiting[0][1].at <= device.now:
            number, work = waiting.pop(0)
            name = f"work-{number}"
            found[name] = device.arrive(name, work.prompt, work.output, work.level, work.tenant)
        device.plan()
        if device.launched:
            device.complete()
        elif waiting:
            device.now = max(device.now, waiting[0][1].at)
    return found


@pytest.mark.parametrize("seed", range(examples(1, at_night=3)))
@pytest.mark.parametrize("size", [{}, {"num_blocks": 120, "max_num_seqs": 8}], ids=["roomy", "tight"])
def test_first_tokens_and_times_between_tokens_differ_by_a_step_and_the_share_that_is_allowed(
    seed: int, size: dict[str, int]
) -> None:
    asked = works(seed, load=3.0)
    alone, beside = Device(0, **size), Device(24, **size)
    served(alone, asked)
    found = served(beside, asked)
    assert beside.busy >= 0.97 * beside.now
    assert not size or beside.scheduler.counters.yields, "the spare class has given back slots or blocks"
    running_steps = 2 * SPARE_STEP_S  # one runs, and one is in flight behind it
    for name in found:
        one, other = alone.times[name], beside.times[name]
        assert len(one) == len(other), "nothing is lost"
        first, first_alone = other[0] - found[name].arrival, one[0] - found[name].arrival
        assert first <= (1 + SPARE_SHARE) * first_alone + running_steps, name
        whole, whole_alone = other[-1] - other[0], one[-1] - one[0]
        assert whole <= (1 + SPARE_SHARE) * whole_alone + running_steps, name
    charged = {tenant: account.charged for tenant, account in beside.core.share.accounts.items()}
    assert SPARE_TENANT not in charged, "the spare class has accounts of its own"
    for tenant, seconds in charged.items():
        assert seconds <= (1 + SPARE_SHARE) * alone.core.share.accounts[tenant].charged, "its share pays for no batch"
