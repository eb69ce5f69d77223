from dataclasses import replace

import pytest
import torch
from torch import Tensor

from backend.calibration_steps import CalibrationStep, calibration_series
from backend.config import EngineConfig
from backend.kernels import experts
from backend.model.model_config import ExpertsConfig
from backend.sampling_params import SamplingParams
from backend.worker.calibration import REPEATS_PER_SHAPE, batch_of, measure
from tests.backend import runners
from tests.backend.runners import CONFIG, MODEL, generate, make_runner

SERIES = [[CalibrationStep(4**n, 16) for n in range(4)], [CalibrationStep(0, 0, 1, 0, 4**n) for n in range(4)]]
STEPS = [step for series in SERIES for step in series]


class SlowDevice:
    """Steps take a time proportional to their tokens, on a clock of their own."""

    def __init__(self, each: float) -> None:
        self._each = each
        self.now = 0.0
        self.ran: list[CalibrationStep] = []

    def run(self, step: CalibrationStep) -> float:
        self.ran.append(step)
        self.now += self._each * step.num_tokens
        return self._each * step.num_tokens

    def clock(self) -> float:
        return self.now


def test_with_time_for_all_every_shape_is_run_as_often() -> None:
    device = SlowDevice(1e-4)
    measured = measure(SERIES, device.run, 10.0, device.clock)
    assert [step for step, _ in measured] == device.ran
    assert all(device.ran.count(step) == REPEATS_PER_SHAPE for step in STEPS)
    assert measured[-1] == (measured[-1][0], 1e-4 * measured[-1][0].num_tokens)


def test_a_slow_device_runs_the_shortest_of_each_kind_in_little_more_than_its_time() -> None:
    device = SlowDevice(0.05)
    measure(SERIES, device.run, 2.0, device.clock)
    assert {step for step in STEPS if step.num_tokens <= 4} < set(device.ran)
    assert max(step.num_tokens for step in device.ran) < 64
    assert device.now <= 2.0


def test_a_batch_has_the_rows_of_its_shape_over_blocks_of_their_own() -> None:
    config = EngineConfig(num_blocks=40, max_model_len=64, block_size=4, max_num_seqs=8, prefill_chunk=None)
    batch = batch_of(CalibrationStep(2, 9, 3, 8, 5), config, config.num_blocks)
    assert (batch.num_decodes, batch.slots) == (2, [0, 1, 2, 3, 4])
    assert (batch.starts, batch.lengths) == ([8, 8, 8, 8, 8], [1, 1, 5, 5, 5])
    assert not batch.stores and batch.sampled == [0, 1] and len(batch.token_ids) == 17
    blocks = [block for _, _, table in batch.new_blocks for block in table]
    assert [len(table) for _, _, table in batch.new_blocks] == [3, 3, 4, 4, 4] and len(set(blocks)) == 18


def test_layers_with_a_window_read_other_blocks() -> None:
    config = EngineConfig(
        num_blocks=99,
        max_model_len=64,
        block_size=4,
        max_num_seqs=8,
        window_groups=2,
        window_tokens=6,
        window_alignment=4,
    )
    batch = batch_of(CalibrationStep(2, 9, 3, 8, 5), config, config.num_blocks)
    blocks = [block for _, _, table in (*batch.new_blocks, *batch.window_blocks) for block in table]
    assert [(first, len(table)) for _, first, table in batch.window_blocks] == [(0, 6), (0, 6), (0, 8), (0, 8), (0, 8)]
    assert len(set(blocks)) == len(blocks) == 18 + 36


def test_all_shapes_run_and_disturb_neither_what_is_cached_nor_who_comes_next() -> None:
    prompts = [[(7 * n + k) % 97 for k in range(3 + n)] for n in range(5)]
    sampling = [SamplingParams(temperature=0, max_tokens=9)] * 5
    expected = generate(make_runner(), prompts, sampling)
    runner = make_runner()
    runner.kv.blocks.uniform_(-1, 1)
    before = runner.kv.blocks.clone()
    for step in [step for series in calibration_series(runner.config) for step in series]:
        output = runner.launch(runner.calibration_batch(step)).wait()
        assert output.elapsed > 0 and len(output.token_ids) == step.num_decodes
    assert torch.equal(runner.kv.blocks[:-1], before[:-1]), "the last is where these kernels store what goes nowhere"
    assert generate(runner, prompts, sampling) == expected


def test_nothing_is_told_of_who_had_the_slots_before() -> None:
    runner = make_runner()
    generate(runner, [[5, 6, 7]] * 3, [SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)] * 3)
    prefills = CalibrationStep(0, 0, 2, 0, 8)
    assert runner.launch(runner.calibration_batch(prefills)).wait().prompt_logprobs is None


def test_a_runner_measures_what_it_has_time_for() -> None:
    runner = make_runner(config=replace(CONFIG, max_num_seqs=4))
    measured = runner.calibrate(0.2)
    assert measured and all(seconds > 0 for _, seconds in measured)


@pytest.mark.parametrize("step", [CalibrationStep(8, 16), CalibrationStep(0, 0, 1, 0, 16)])
def test_tokens_of_a_step_choose_experts_of_their_own(step: CalibrationStep, monkeypatch: pytest.MonkeyPatch) -> None:
    route, numbers = experts.route, list[int]()

    def counted(logits: Tensor, per_token: int, normalises: bool) -> tuple[Tensor, Tensor]:
        weights, chosen = route(logits, per_token, normalises)
        numbers.append(len(chosen.unique()))
        return weights, chosen

    monkeypatch.setattr(experts, "route", counted)
    monkeypatch.setattr(runners, "MODEL", replace(MODEL, experts=ExpertsConfig(16, 2, normalises=True)))
    runner = make_runner()
    runner.kv.blocks.zero_()
    runner.launch(runner.calibration_batch(step)).wait()
    assert numbers and min(numbers) > 4
