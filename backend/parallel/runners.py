"""The runners of a tensor-parallel model: rank 0 plans and samples, the others compute the same steps beside it."""

from collections import deque
from functools import partial

import torch
from torch import Tensor

from backend.config import EngineConfig
from backend.errors import DeviceError
from backend.model.decoder import Decoder
from backend.paged_kv.kv_cache import KVCache
from backend.parallel.messages import WARM_UP, Message, decoded, encoded
from backend.parallel.rank_group import RankGroup
from backend.parallel.rank_processes import RankProcesses
from backend.scheduler.batch import Batch, NewSequence
from backend.worker.device_errors import explained
from backend.worker.device_stream import DeviceStream, Work
from backend.worker.model_runner import LaunchedStep, ModelRunner, StepSampler
from backend.worker.sampler import TokenChoice
from backend.worker.staging import StagedStep


def _group(decoder: Decoder) -> RankGroup:
    assert decoder.parallel is not None
    return decoder.parallel.group


class LeadingRunner(ModelRunner):
    """The runner of rank 0, which the engine uses like any `ModelRunner`. It sends each step to the other ranks as its
    own work begins.

    A step for which one rank has no memory is not run again, because the other ranks may have had memory: it fails like
    any other, and so does every step behind a step that was interrupted halfway.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        config: EngineConfig,
        others: RankProcesses,
        device_stream: DeviceStream | None = None,
    ) -> None:
        self._group = _group(decoder)
        self.others = others
        self._is_warming_up = False
        self._is_out_of_step = False
        super().__init__(decoder, kv, config, device_stream)

    def warm_up(self) -> None:
        self.others.tell(WARM_UP)
        self._is_warming_up = True  # each rank launches the same steps by itself
        try:
            super().warm_up()
        finally:
            self._is_warming_up = False

    def failure(self, step: int, error: Exception) -> DeviceError:
        lost = self.others.find_lost()
        return lost or DeviceError(explained(f"step {step} failed on rank 0", error))

    def _work(self, batch: Batch, run: Work) -> Work:
        return partial(self._lead, batch, run)

    def _lead(self, batch: Batch, run: Work) -> None:
        if self._is_out_of_step:
            raise DeviceError("the ranks are out of step, since one of them was interrupted: load the model again")
        self._is_out_of_step = True
        if not self._is_warming_up:
            self.others.tell(encoded(batch))
        run()
        self._is_out_of_step = False

    def _make_sampler(self) -> StepSampler:
        return _SharedTokens(self._group, super()._make_sampler())


class _SharedTokens:
    """Samples, and shares the tokens with the other ranks, whose next steps begin with them."""

    def __init__(self, group: RankGroup, sampler: StepSampler) -> None:
        self._group = group
        self._sampler = sampler

    def admit(self, admitted: NewSequence) -> None:
        self._sampler.admit(admitted)

    def stage(self, staged: StagedStep) -> TokenChoice:
        choice = self._sampler.stage(staged)
        return TokenChoice(lambda logits: self._group.share(choice.choose(logits)), choice.restricts)


class FollowingRunner(ModelRunner):
    """The runner of a rank from 1 on: it computes the steps of rank 0, with the tokens that rank 0 draws."""

    def __init__(
        self, decoder: Decoder, kv: KVCache, config: EngineConfig, device_stream: DeviceStream | None = None
    ) -> None:
        self._group = _group(decoder)
        super().__init__(decoder, kv, config, device_stream)

    def follow(self, message: Message, launched: deque[LaunchedStep]) -> None:
        """Do as rank 0 says. `launched` holds the steps that are not waited for, no more than the engine has in
        flight.
        """
        if message == WARM_UP:
            self.warm_up()
            return
        assert isinstance(message, tuple)
        batch = decoded(message)
        if batch.step <= self._newest:
            launched.clear()
        launched.append(self.launch(batch))
        while len(launched) >= (self.config.steps_in_flight if self.runs_ahead else 1):
            launched.popleft().wait()

    def _make_sampler(self) -> StepSampler:
        return _ReceivedTokens(self._group)


class _ReceivedTokens:
    """Receives the tokens that rank 0 samples from the same logits."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def admit(self, admitted: NewSequence) -> None:
        pass

    def stage(self, staged: StagedStep) -> TokenChoice:
        return TokenChoice(self._receive, restricts=False)

    def _receive(self, logits: Tensor) -> Tensor:
        return self._group.share(logits.new_zeros(len(logits), dtype=torch.int64))
