"""Shared contents of simulated prompts and answers: blocks are named by a trace's content ids, without tokens.

Contents are known in units of a fixed number of tokens from the beginning. The id of a unit stands for its tokens and
all before them, so that two prompts share their common ids. Tokens without an id in the trace have no name and are
never found.
"""

from itertools import count
from typing import NamedTuple
from weakref import WeakValueDictionary

from backend.paged_kv.block_names import BlockName
from backend.scheduler.sequence import Sequence, SequenceStatus


class Content(NamedTuple):
    """The identity of a prompt's tokens, and of the answer's behind it."""

    ids: tuple[int, ...]  # of units from the prompt's first token on
    unit: int | None  # tokens in each; None: the one id stands for all tokens, of prompt and answer
    length: int | None = None  # known tokens: the prompt's; None: as many as the ids cover
    repetition: int = 0  # of the trace; repetitions share nothing
    scope: str | None = None  # its sharing scope, unless a policy sets one; None: the tenant

    @classmethod
    def of_session(cls, session: int) -> "Content":
        """The content of a session's requests: each begins with the previous prompt and answer."""
        return cls((session,), None)

    def id_at(self, token: int) -> int | None:
        """The id of the unit at this token; None if unknown."""
        if self.length is not None and token >= self.length:
            return None
        unit = 0 if self.unit is None else token // self.unit
        return self.ids[unit] if unit < len(self.ids) else None


class SimulatedNames:
    """Names the blocks of simulated sequences, for as long as the names are used."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._names: WeakValueDictionary[tuple[object, ...], BlockName] = WeakValueDictionary()
        self._ordinals = count(1)
        self._contents: dict[str, tuple[str, Content]] = {}  # of live sequences, with their scopes

    def arrives(self, sequence: Sequence, scope: str, content: Content | None) -> None:
        """Name the full blocks of a prompt, which are shared within the scope."""
        if content is None:
            return
        self._contents[sequence.id] = scope, content
        self.name(sequence, sequence.num_prompt_tokens // self._block_size)

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that was refused."""
        self._contents.pop(sequence.id, None)

    def name(self, sequence: Sequence, num_blocks: int) -> None:
        """Name the first `num_blocks` blocks of a sequence, as far as their content is known."""
        if sequence.id not in self._contents:
            return
        scope, content = self._contents[sequence.id]
        names, size = sequence.block_names, self._block_size
        for index in range(len(names), num_blocks):
            unit = content.id_at((index + 1) * size - 1)
            if unit is None:
                break
            names.append(self._name((scope, content.repetition, content.unit, unit, index)))
        if sequence.status is SequenceStatus.FINISHED:
            self.forget(sequence)

    def _name(self, key: tuple[object, ...]) -> BlockName:
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = BlockName(next(self._ordinals))
        return name
