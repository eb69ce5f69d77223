"""A device made of a roofline: its floor is the plan's, and a simulation reads what is saved of it."""

from pathlib import Path

import pytest
from labs.simulation.pools.roofline_device import RooflineDevice, step_time_of

from admission.step_times.step_time import StepWork, prefill_work
from backend.model.known_shapes import LLAMA_3_8B
from backend.roofline import GPUS, Footprint, MemoryPlan, Roofline
from labs.simulation.device import find_device

FOOTPRINT = Footprint(LLAMA_3_8B, "bfloat16")
ROOFLINE = Roofline(FOOTPRINT, GPUS["a100"])
PLAN = MemoryPlan.make(FOOTPRINT, 80 * 2**30, 8192, 256, 2048)


@pytest.mark.parametrize(("batch", "context"), [(1, 512), (64, 1024), (256, 2048)])
def test_its_floor_is_that_of_the_roofline(batch: int, context: int) -> None:
    step = step_time_of(ROOFLINE, overlaps=True)
    seconds = step.seconds(StepWork(0, batch, batch * context))
    assert seconds == pytest.approx(ROOFLINE.decode(batch, context), rel=0.01)


def test_prompts_take_their_products_and_what_each_token_attends_to() -> None:
    step = step_time_of(ROOFLINE, overlaps=True)
    pairs = 4 * 32 * 32 * 128 * (4096 * 4097 // 2) / ROOFLINE.rate
    assert step.seconds(prefill_work(0, 4096)) == pytest.approx(ROOFLINE.prefill(4096) + pairs, rel=0.01)


def test_products_that_follow_on_reading_take_both_times() -> None:
    floor, sum_of_both = step_time_of(ROOFLINE, overlaps=True), step_time_of(ROOFLINE)
    work = StepWork(0, 64, 64 * 1024)
    assert sum_of_both.seconds(work) == pytest.approx(
        floor.seconds(work) + 64 * 2 * FOOTPRINT.num_multiplied / ROOFLINE.rate
    )


def test_a_simulation_reads_what_is_saved(tmp_path: Path) -> None:
    made = RooflineDevice.of("planned", ROOFLINE, PLAN)
    (tmp_path / "planned.json").write_text(made.to_json())
    device = find_device(str(tmp_path / "planned.json"))
    assert (device.name, device.kv_tokens, device.kv_bytes_per_token) == ("planned", PLAN.kv_tokens, 131_072)
    work = prefill_work(100, 400) + StepWork(0, 30, 30_000)
    assert device.seconds(work) == made.device.seconds(work) == made.step_time.seconds(work)
