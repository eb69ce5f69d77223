from hypothesis import given
from hypothesis import strategies as st

from admission.pace import Pace
from admission.step_time import StepTime, StepTimeModel, StepWork
from backend.config import EngineConfig

CONFIG = EngineConfig(num_blocks=1000, max_model_len=4096, max_num_batched_tokens=512)
MODEL = StepTimeModel(StepTime((5e-3, 5e-5, 5e-5, 1e-7, 1e-7, 1e-9, 1e-6)))


def test_prefill_alone_fills_the_step() -> None:
    assert Pace(CONFIG, MODEL).prefill_room(0, 0, None) == 512


def test_where_nothing_is_promised_prefill_gets_its_share() -> None:
    assert Pace(CONFIG, MODEL, prefill_share=0.25).prefill_room(8, 800, None) == 128


@given(st.integers(1, 256), st.floats(1e-4, 0.2))
def test_the_step_keeps_the_promise_or_carries_one_block(decodes: int, interval: float) -> None:
    context = decodes * 500
    room = Pace(CONFIG, MODEL).prefill_room(decodes, context, interval)
    chunk = StepWork(prefill_tokens=room, prefill_pairs=room * room // 2)
    step = StepWork(decode_tokens=decodes, decode_context=context) + chunk
    assert room == CONFIG.block_size or MODEL.fitted.seconds(step) <= interval
