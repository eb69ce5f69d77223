import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.sampling_params import SamplingParams
from backend.scheduler.batch import NewSequence
from backend.worker.sampler import SlotSampler


def penalised_naively(logits: list[float], prompt: list[int], output: list[int], params: SamplingParams) -> list[float]:
    result = list(logits)
    for token in {*prompt, *output}:
        logit, factor = logits[token], params.repetition_penalty
        repeated = logit / factor if logit > 0 else logit * factor
        times = output.count(token)
        result[token] = repeated - params.frequency_penalty * times - params.presence_penalty * (times > 0)
    return result


@settings(deadline=None)
@given(
    prompt=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    repetition=st.floats(0.5, 2),
    resumed_after=st.integers(0, 8),
)
def test_penalties_follow_the_tokens_as_they_are_sampled_also_after_a_preemption(
    prompt: list[int], presence: float, frequency: float, repetition: float, resumed_after: int
) -> None:
    params = SamplingParams(
        temperature=0, presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition
    )
    machine = SlotSampler(3, 10)
    machine.admit(NewSequence(2, params, 0, prompt, len(prompt)))
    machine.admit(NewSequence(0, SamplingParams(temperature=0), 0, [1], 1))
    generator = torch.Generator().manual_seed(len(prompt))
    output: list[int] = []
    for step in range(8):
        if step == resumed_after:
            machine.admit(NewSequence(1, SamplingParams(temperature=0), 0, [1], 1))
            machine.admit(NewSequence(2, params, 0, prompt + output, len(prompt)))
        logits = torch.randn(2, 10, generator=generator)
        expected = torch.tensor(penalised_naively(logits[1].tolist(), prompt, output, params))
        seen = logits.clone()
        token = machine.sample(seen, np.array([0, 2]), np.array([5, len(prompt) + step])).tolist()[1]
        torch.testing.assert_close(seen[1], expected, atol=1e-5, rtol=1e-5)
        assert token == int(seen[1].argmax())
        output.append(token)


def test_no_memory_is_taken_until_a_request_is_penalised() -> None:
    machine = SlotSampler(4, 50)
    machine.admit(NewSequence(0, SamplingParams(), 0, [1], 1))
    assert machine.batch(np.array([0]), np.array([1]), torch.device("cpu")).penalties is None
    machine.admit(NewSequence(0, SamplingParams(presence_penalty=1), 0, [1], 1))
    assert machine.batch(np.array([0]), np.array([1]), torch.device("cpu")).penalties is not None


def test_of_sequences_that_end_before_they_sample_nothing_is_kept_but_each_slots_last() -> None:
    """Clients may leave before the first token as often as they like, while nobody else has penalties or rules."""
    machine = SlotSampler(4, 50)
    params = SamplingParams(presence_penalty=1, logit_bias=((3, 1.0),))
    admitted = [NewSequence(n % 2, params, n, [n % 50] * 9, 9) for n in range(40)]
    for one in admitted:
        machine.admit(one)
    batch = machine.batch(np.array([0]), np.array([9]), torch.device("cpu"))
    assert batch.penalties is not None
    assert batch.processed is not None
    assert batch.penalties.arrived == [rules.admitted for rules in batch.processed.arrived] == admitted[-2:]
