"""When the blocks of ended sequences were free, in steps, as a replay of a gateway's event log finds it."""

from collections.abc import Iterable

from admission.event_logs.event_log import replay
from backend.scheduler.sequence import Sequence, SequenceStatus


def steps_to_release(lines: Iterable[str]) -> list[int]:
    """For each ended sequence, the steps that were completed after its end until it held no block.

    A sequence that still holds blocks when the log ends has taken all steps until then. Raises `LogError`.
    """
    sequences: dict[str, Sequence] = {}
    live, ending, found = dict[str, Sequence](), dict[str, int](), list[int]()
    for kind, _, *said in replay(lines, sequences):
        if kind == "arrive":
            live[said[0]] = sequences[said[0]]
        if kind == "done":
            for name in ending:
                ending[name] += 1
        elif kind != "finish":
            continue
        for name in [name for name, one in live.items() if one.status is SequenceStatus.FINISHED]:
            ending[name] = 0
            del live[name]
        for name in [name for name in ending if not sequences[name].block_table.blocks]:
            found.append(ending.pop(name))
    return found + list(ending.values())
