"""What a replay of a gateway's event log finds of ended sequences: when their blocks were free, what was computed."""

from collections.abc import Iterable
from typing import NamedTuple

from admission.event_logs.event_log import replay
from admission.event_logs.numbers import in_seconds
from backend.scheduler.sequence import Sequence, SequenceStatus


class Release(NamedTuple):
    """An ended sequence. One that holds blocks when the log ends has taken all steps until then."""

    arrived: float  # seconds on the engine's clock
    steps: int  # completed after its end until it held no block
    tokens: int  # of its prompt and output, computed or found in the cache, when it ended


def released(lines: Iterable[str]) -> list[Release]:
    """Raises `LogError`."""
    sequences: dict[str, Sequence] = {}
    live, ending, found = dict[str, float](), dict[str, Release](), list[Release]()
    for kind, moment, *said in replay(lines, sequences):
        if kind == "arrive":
            live[said[0]] = in_seconds(moment)
        if kind == "done":
            ending = {name: one._replace(steps=one.steps + 1) for name, one in ending.items()}
        elif kind != "finish":
            continue
        for name in [name for name in live if sequences[name].status is SequenceStatus.FINISHED]:
            ending[name] = Release(live.pop(name), 0, _charged_tokens(sequences[name]))
        for name in [name for name in ending if not sequences[name].block_table.blocks]:
            found.append(ending.pop(name))
    return found + list(ending.values())


def _charged_tokens(sequence: Sequence) -> int:
    """The prompt counts once any of it was computed, or all of it was found in the cache or forked."""
    has_prompt = sequence.num_billed_tokens or sequence.num_cached_tokens == sequence.num_prompt_tokens
    return len(sequence.output) + (sequence.num_prefilled_tokens if has_prompt else 0)
