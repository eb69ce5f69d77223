import asyncio
import sys
from types import FrameType

from labs.benchmarks.parts import PartSampler

seen: list[FrameType] = []


def look() -> None:
    seen.append(sys._getframe())


def inner() -> None:
    look()


async def outer() -> None:
    await asyncio.sleep(0)
    look()
    inner()


def test_every_marker_is_a_function_of_the_gateway() -> None:
    PartSampler()


def test_a_sample_counts_for_the_nearest_marker_also_of_a_coroutine_that_went_on() -> None:
    sampler = PartSampler({"out": [f"{__name__}:outer"], "in": [f"{__name__}:inner"]})
    seen.clear()
    asyncio.run(outer())
    look()
    for frame in seen:
        sampler.sample(0, frame)
    assert sampler.samples == {"out": 1, "in": 1, "loop": 1}
