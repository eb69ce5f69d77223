"""The ranks of a model as threads of one process, each with its own part and its own memory."""

import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import torch

from backend.config import EngineConfig
from backend.model.decoder import Decoder
from backend.model.model_config import ModelConfig
from backend.model.weights import Weights, checkpoint_names, empty_weights, random_weights
from backend.paged_kv.kv_cache import KVCache
from backend.parallel.loading import meet
from backend.parallel.messages import STOP, Message
from backend.parallel.rank_group import Parallel
from backend.parallel.runners import FollowingRunner, LeadingRunner
from backend.parallel.shard import Shard
from backend.worker.device_stream import DeviceStream
from backend.worker.model_runner import LaunchedStep
from tests.backend.runners import MODEL, PaddedOps

Result = TypeVar("Result")


@contextmanager
def taking_turns() -> Iterator[None]:
    """Threads wait for each other some hundred times, and each computes on one core."""
    interval, num_threads = sys.getswitchinterval(), torch.get_num_threads()
    sys.setswitchinterval(1e-5)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        torch.set_num_threads(num_threads)


def on_ranks(config: ModelConfig, size: int, folder: Path, run: Callable[[Parallel], Result]) -> list[Result]:
    """What each rank's `run` returns; `folder` is theirs to meet in."""

    def run_rank(rank: int) -> Result:
        group = meet(rank, size, folder / f"meeting-of-{size}", torch.device("cpu"))
        return run(Parallel(Shard.of(config, rank, size), group))

    with taking_turns(), ThreadPoolExecutor(size) as threads:
        return list(threads.map(run_rank, range(size)))


class OtherThreads:
    """Stands for the processes of the other ranks."""

    def __init__(self, number: int) -> None:
        self.inboxes: list[SimpleQueue[Message]] = [SimpleQueue() for _ in range(number)]

    def tell(self, message: Message) -> None:
        for inbox in self.inboxes:
            inbox.put(message)

    def find_lost(self) -> None:
        return None


def lead(
    size: int,
    folder: Path,
    config: EngineConfig,
    run: Callable[[LeadingRunner], Result],
    make_stream: Callable[[], DeviceStream | None] = lambda: None,
    make_decoder: Callable[[Parallel], Decoder] | None = None,
    model: ModelConfig = MODEL,
) -> Result:
    """What `run` returns of the leading runner of a model, on as many ranks as `size`. `make_decoder` makes the part of
    a rank; without it the model is the random one of `runners`.
    """
    others = OtherThreads(size - 1)

    def run_rank(parallel: Parallel) -> Result | None:
        if make_decoder is not None:
            decoder = make_decoder(parallel)
        else:
            weights, ops = _part(random_weights(MODEL, torch.float32), parallel.shard), PaddedOps()
            decoder = Decoder(MODEL, weights, ops, config.max_model_len, parallel)
        num_blocks, cpu, layers = config.num_blocks + 1, torch.device("cpu"), decoder.groups.size
        kv = KVCache(decoder.config, num_blocks, config.block_size, torch.float32, cpu, num_layers=layers)
        rank = parallel.shard.rank
        if rank:
            _follow(FollowingRunner(decoder, kv, config, make_stream()), others.inboxes[rank - 1])
            return None
        try:
            return run(LeadingRunner(decoder, kv, config, others, make_stream()))  # type: ignore[arg-type]
        finally:
            others.tell(STOP)

    result = on_ranks(model, size, folder, run_rank)[0]
    assert result is not None
    return result


def _follow(runner: FollowingRunner, inbox: "SimpleQueue[Message]") -> None:
    launched: deque[LaunchedStep] = deque()
    while (message := inbox.get()) != STOP:
        runner.follow(message, launched)


def _part(whole: Weights, shard: Shard) -> Weights:
    part = empty_weights(MODEL, torch.float32, torch.device("cpu"), shard)
    stored = dict(checkpoint_names(MODEL, whole))
    for name, target in checkpoint_names(MODEL, part, shard):
        target.copy_(stored[name][shard.slices(name, MODEL)])
    return part
