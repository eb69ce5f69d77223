import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from backend.scheduler.batch import Batch
from backend.worker.model_runner import LaunchedStep, ModelRunner
from benchmarks.gpu_check import leak
from benchmarks.gpu_check.finding import Finding

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leak, "SMALL", replace(leak.SMALL, steps=60, seqs=2))
    monkeypatch.setattr(leak, "KINDS", leak.KINDS[-2:])


def findings() -> dict[str, Finding]:
    return {finding.what.partition(" after the first ")[0]: finding for finding in leak.check(CPU)}


def test_an_engine_gives_its_memory_back() -> None:
    found = findings()
    assert found["memory allocated, growth"].met
    assert found["KV blocks of a second load, of the first's"].met
    assert found["models that stay when they are let go"].met
    assert found["allocated after the second, beyond the first"].met


def test_memory_that_steps_keep_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    launch, kept = ModelRunner.launch, list[torch.Tensor]()

    def launch_and_keep(self: ModelRunner, batch: Batch) -> LaunchedStep:
        kept.append(torch.zeros(1000))
        return launch(self, batch)

    monkeypatch.setattr(ModelRunner, "launch", launch_and_keep)
    assert findings()["memory allocated, growth"].met is False


def test_a_model_that_only_the_garbage_collector_frees_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    made = leak.random_runner

    def with_a_cycle(*arguments: object) -> ModelRunner:
        runner = made(*arguments)  # type: ignore[arg-type]
        runner.itself = runner  # type: ignore[attr-defined]
        return runner

    monkeypatch.setattr(leak, "random_runner", with_a_cycle)
    found = findings()
    assert found["models that stay when they are let go"].value == 2
    assert found["allocated after the second, beyond the first"].met is False


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """What the tests before have left does not count as memory that is given back here."""
    leak.gc.collect()
    yield
    leak.gc.collect()


def test_operations_that_have_the_host_wait_are_told_by_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with leak.waits_of_the_host(torch.device("cuda")) as waits:
        warnings.warn("called a synchronizing CUDA operation (triggered at ...)", stacklevel=1)
        warnings.warn("of another kind", stacklevel=1)
    assert modes == ["warn", "default"]
    assert len(waits) == 1 and waits[0].startswith(__file__)
