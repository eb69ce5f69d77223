from math import inf

import orjson
from hypothesis import given
from hypothesis import strategies as st

from backend.scheduler.batch import TokenLogprobs
from backend.scheduler.sequence import Sequence
from gateway.workers.logprobs import LogprobsMessage, take_logprobs
from tests.backend.sequences import make_sequence

numbers = st.floats(-1e4, 0) | st.just(-inf)


@st.composite
def streams(draw: st.DrawFn) -> list[tuple[list[TokenLogprobs], list[TokenLogprobs]]]:
    """Log probabilities of the prompts and of the outputs of some streams."""

    def tokens() -> list[TokenLogprobs]:
        top = draw(st.integers(0, 3))
        ids, logprobs = (st.lists(one, min_size=top, max_size=top) for one in (st.integers(0, 2**31), numbers))
        return draw(st.lists(st.builds(TokenLogprobs, numbers, st.integers(1, 9), ids, logprobs), max_size=3))

    return [(tokens(), tokens()) for _ in range(draw(st.integers(0, 3)))]


def stream() -> Sequence:
    sequence = make_sequence("r", "tenant", [5, 6], 8)
    sequence.logprobs, sequence.prompt_logprobs = [], []
    return sequence


@given(streams(), st.booleans())
def test_log_probabilities_cross_unchanged(told: list[tuple[list[TokenLogprobs], ...]], first_is_gone: bool) -> None:
    message = LogprobsMessage()
    for number, (prompt, output) in enumerate(told):
        message.add(number, prompt, is_prompt=True)
        message.add(number, output[:1])
        message.add(number, output[1:])
    sequences = {number: stream() for number in range(first_is_gone, len(told))}
    take_logprobs(orjson.loads(orjson.dumps(message.entries)), memoryview(message.binary()), sequences)
    for number, sequence in sequences.items():
        assert (sequence.prompt_logprobs, sequence.logprobs) == told[number]
