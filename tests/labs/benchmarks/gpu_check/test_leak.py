import gc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from backend.config import EngineOptions
from backend.scheduler.batch import Batch
from backend.worker.model_runner import LaunchedStep, ModelRunner
from labs.benchmarks.gpu_check import leak
from labs.benchmarks.gpu_check.finding import Finding

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leak, "SMALL", replace(leak.SMALL, steps=40, seqs=2))
    monkeypatch.setattr(leak, "KINDS", leak.KINDS[-2:])


def named(findings: Iterator[Finding]) -> dict[str, Finding]:
    return {finding.what.partition(" after the first ")[0]: finding for finding in findings}


def steps() -> dict[str, Finding]:
    plan = leak.SMALL
    return named(leak._steps(plan, CPU, leak.random_runner(plan.model, plan.options(CPU), CPU)))


def loads(load: Callable[[], ModelRunner]) -> dict[str, Finding]:
    return named(leak._loads(CPU, load))


def loaded() -> ModelRunner:
    return leak.random_runner(leak.SMALL.loaded, EngineOptions(max_num_seqs=2, max_num_batched_tokens=32), CPU)


def test_an_engine_gives_its_memory_back() -> None:
    assert steps()["memory allocated, growth"].met
    found = loads(loaded)
    assert found["KV blocks of a second load, of the first's"].met
    assert found["models that stay when they are let go"].met
    assert found["allocated after the second, beyond the first"].met


def test_memory_that_steps_keep_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    launch, kept = ModelRunner.launch, list[torch.Tensor]()

    def launch_and_keep(self: ModelRunner, batch: Batch) -> LaunchedStep:
        kept.append(torch.zeros(1000))
        return launch(self, batch)

    monkeypatch.setattr(ModelRunner, "launch", launch_and_keep)
    assert steps()["memory allocated, growth"].met is False


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """A model that a test has kept is no other test's."""
    yield
    gc.collect()


def test_operations_that_have_the_host_wait_are_told_by_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with leak.waits_of_the_host(torch.device("cuda")) as waits:
        warnings.warn("called a synchronizing CUDA operation (triggered at ...)", stacklevel=1)
        warnings.warn("of another kind", stacklevel=1)
    assert modes == ["warn", "default"]
    assert len(waits) == 1 and waits[0].startswith(__file__)
