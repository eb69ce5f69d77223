"""Loads a tensor-parallel model: each rank reads and places its own part, in a process of its own."""

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from backend.config import EngineOptions
from backend.errors import BackendError
from backend.model.model_config import ModelConfig, read_model_config
from backend.model.weights import load_weights
from backend.parallel.messages import MEET, RankSetup
from backend.parallel.rank_group import Parallel, RankGroup
from backend.parallel.rank_processes import RankProcesses
from backend.parallel.runners import FollowingRunner, LeadingRunner
from backend.parallel.shard import Shard
from backend.placement import DTYPES, place_part
from backend.sizing import ModelDemand
from backend.worker.device_errors import placing

LOOPBACK = "lo"


def load_leading(
    size: int,
    directory: Path,
    config: ModelConfig,
    options: EngineOptions,
    dtype: torch.dtype,
    device: torch.device,
    kernels: str,
    progress: Callable[[int], None],
) -> LeadingRunner:
    """Load a model on `size` ranks, of which this process is rank 0; on a CPU they divide its threads.

    Raises the errors of `load_model`, also those of another rank.
    """
    shards = [Shard.of(config, rank, size) for rank in range(size)]  # before anything is started
    before = torch.get_num_threads()
    threads = max(1, before // size)
    torch.set_num_threads(threads)
    name = str(dtype).removeprefix("torch.")
    with tempfile.TemporaryDirectory(prefix="sluice-ranks-", ignore_cleanup_errors=True) as folder:
        meeting = Path(folder) / "meeting"
        others = RankProcesses(
            RankSetup(rank, size, meeting, directory, options, name, device, kernels, threads)
            for rank in range(1, size)
        )
        try:
            weights = load_weights(directory, config, dtype, device, progress, shards[0])
            others.await_answers()
            others.tell(MEET)
            parallel = Parallel(shards[0], meet(0, size, meeting, device))
            make_runner = partial(LeadingRunner, others=others)
            demand = ModelDemand(options, config, dtype, shards[0])
            runner = place_part(demand, weights, device, kernels, parallel, make_runner)
            others.await_answers()
        except BaseException as error:
            lost = None if isinstance(error, BackendError) or not isinstance(error, Exception) else others.find_lost()
            others.end_all()
            torch.set_num_threads(before)
            if lost is not None:
                raise lost from error
            raise
    return runner


def load_rank(setup: RankSetup, wait_until_all_have_loaded: Callable[[], object]) -> FollowingRunner:
    """Load the part of a rank from 1 on."""
    config = read_model_config(setup.directory)
    shard = Shard.of(config, setup.rank, setup.size)
    device = setup.device if setup.device.type == "cpu" else torch.device(setup.device.type, setup.rank)
    dtype = DTYPES[setup.dtype]
    with placing(device):
        weights = load_weights(setup.directory, config, dtype, device, shard=shard)
        wait_until_all_have_loaded()
        parallel = Parallel(shard, meet(setup.rank, setup.size, setup.meeting_place, device))
        demand = ModelDemand(setup.options, config, dtype, shard)
        return place_part(demand, weights, device, setup.kernels, parallel, FollowingRunner)


def meet(rank: int, size: int, meeting_place: Path, device: torch.device) -> RankGroup:
    """Wait for the other ranks, which are processes of this machine."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)  # otherwise gloo resolves the host's name, which may fail
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return RankGroup(rank, size, meeting_place, device)
