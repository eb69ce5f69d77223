import pytest
import torch

from admission.core import CoreConfig
from labs.benchmarks.gpu_check import tenants
from tests.admission.staged_core import StagedCore


def ended_lines(stage: StagedCore) -> list[str]:
    return [f"{line}\n" for line in stage.lines]


def test_steps_are_counted_from_a_cancellation_to_the_release_of_its_memory() -> None:
    stage = StagedCore(CoreConfig())
    gone, stays = stage.arrive("gone", 6, 30), stage.arrive("stays", 6, 30)
    stage.step()
    stage.step()
    stage.finish(gone)
    assert gone.block_table.blocks, "steps in flight name it"
    assert tenants._released_after(ended_lines(stage), 1) is None
    steps = 0
    while gone.block_table.blocks:
        stage.step()
        steps += 1
    assert tenants._released_after(ended_lines(stage), 1) == steps
    assert 1 <= steps <= 2 and stays.block_table.blocks
    assert tenants._released_after(ended_lines(stage), 2) is None


def test_a_line_that_is_not_written_to_its_end_waits() -> None:
    stage = StagedCore(CoreConfig())
    gone = stage.arrive("gone", 6, 30)
    stage.step()
    stage.finish(gone)
    stage.drain()
    lines = ended_lines(stage)
    assert tenants._released_after([*lines, '["plan",10'], 1) == tenants._released_after(lines, 1)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_every_promise_is_measured() -> None:
    found = [finding for finding in tenants.check(torch.device("cpu")) if finding.bound is not None]
    assert len(found) == 6
    assert found[0].what.startswith("3 streams dropped: steps") and found[0].met
