"""What every estimate rests on: more work never looks shorter, and a token more never looks like a jump."""

from random import Random

from admission.ledger import EngineTimeTariff
from admission.prefill_sizer import PrefillSizer
from admission.step_time import StepTimeModel, StepWork
from backend.config import EngineConfig


def more_work_never_looks_shorter(model: StepTimeModel, engine: EngineConfig) -> None:
    """Of a step, of a whole request, and of what prefill leaves to decodes that were promised an interval."""
    random = Random(model.num_steps)
    fitted = model.fitted
    assert all(coefficient >= 0 for coefficient in fitted.coefficients)
    _check_steps(model, random)
    tariff, sizer = EngineTimeTariff(model), PrefillSizer(engine, model)
    for _ in range(4):
        prompt, output, more = (random.randrange(1, 2000) for _ in range(3))
        least = tariff.estimate(prompt, output)
        assert least <= min(tariff.estimate(prompt + more, output), tariff.estimate(prompt, output + more))
        decodes, context, interval = random.randint(1, 64), random.randrange(10_000), random.uniform(0.001, 0.1)
        room = sizer.prefill_budget(decodes, context, interval, 2000).fits(prompt, 2000)
        assert room >= sizer.prefill_budget(decodes + 1, context + more, interval, 2000).fits(prompt + more, 2000)


def _check_steps(model: StepTimeModel, random: Random) -> None:
    """A prefill token and a decode more, also at the knee, where the device turns compute-bound."""
    fitted = model.fitted
    _, prefill, decode, context, _, pairs, beyond = fitted.coefficients
    for tokens in (fitted.knee - 1, fitted.knee, random.randrange(4 * fitted.knee)):
        work = StepWork(tokens, 0, random.randrange(1000), random.randrange(1000), random.randrange(100_000))
        seconds = fitted.seconds(work)
        step_up = (prefill + decode + context + pairs + beyond) * (1 + 1e-9) + 1e-9 * seconds
        for added in (StepWork(prefill_tokens=1, prefill_pairs=1), StepWork(decode_tokens=1, decode_context=1)):
            assert seconds <= fitted.seconds(work + added) <= seconds + step_up
