"""What a tenant finds in the prefix cache does not depend on others: not on what they say, and within its floor not on
how much.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.paged_kv.block_pool import blocks_for
from backend.scheduler.sequence import Sequence, SequenceStatus
from tests.backend.scheduler.bench import Bench
from tests.examples import examples

BLOCK = 4
LONGEST = 40  # tokens of prompt and answer
STEMS = [[100 * stem + position for position in range(LONGEST)] for stem in range(1, 4)]


@dataclass(frozen=True)
class Ask:
    """A request, of one of a few beginnings."""

    stem: int
    shared: int  # tokens of it
    own: tuple[int, ...]  # and others behind them
    max_tokens: int
    salt: str | None = None

    @property
    def prompt(self) -> list[int]:
        return STEMS[self.stem][: self.shared] + list(self.own)

    def say(self, bench: Bench, tenant: str) -> Sequence:
        salt = None if self.salt is None else f"{tenant}, {self.salt}"
        return bench.say(self.prompt, self.max_tokens, tenant, salt)


@dataclass(frozen=True)
class Turn:
    """A request of the tenant, and what another one asks while it is served: at which of its steps, and what."""

    asked: Ask
    beside: list[tuple[int, Ask]] = field(default_factory=list)


asks = st.builds(
    Ask,
    st.integers(0, len(STEMS) - 1),
    st.integers(1, 26),
    st.lists(st.integers(10, 12), max_size=3).map(tuple),
    st.integers(1, 9),
    st.sampled_from([None, None, "narrow"]),
)


@st.composite
def turns(draw: st.DrawFn) -> list[Turn]:
    """Draw requests, and others beside them, of which some say the same as those before, now or later."""
    asked = draw(st.lists(asks, min_size=1, max_size=6))
    others = st.lists(st.tuples(st.integers(0, 5), st.one_of(st.sampled_from(asked), asks)), max_size=5)
    return [Turn(ask, draw(others)) for ask in asked]


def found(turns: list[Turn], with_others: bool, floor: int = 0, **config: object) -> list[int]:
    """Serve a tenant's requests, each once the one before it is over; returns how many tokens of each were found."""
    bench = Bench(block_size=BLOCK, max_model_len=LONGEST, **config)
    bench.scheduler.kv_manager.cache.limit("a", floor, None)
    counts = []
    for turn in turns:
        due = dict[int, list[Ask]]()
        for step, ask in turn.beside if with_others else []:
            due.setdefault(step, []).append(ask)
        for ask in due.pop(0, []):
            ask.say(bench, "b")
        sequence, step = turn.asked.say(bench, "a"), 0
        while sequence.status is not SequenceStatus.FINISHED or sequence.block_table.blocks:
            bench.step()
            step += 1
            for ask in due.pop(step, []):
                ask.say(bench, "b")
        counts.append(sequence.num_cached_tokens)
    bench.drain()
    return counts


@settings(max_examples=examples(30, at_night=1500), deadline=None)
@given(turns(), st.sampled_from([{}, {"steps_in_flight": 1}, {"prefill_chunk": 3}, {"max_num_seqs": 2}]))
def test_with_memory_for_all_a_tenant_finds_the_same_beside_any_others(
    turns: list[Turn], config: dict[str, object]
) -> None:
    alone = found(turns, with_others=False, num_blocks=400, **config)
    assert found(turns, with_others=True, num_blocks=400, **config) == alone


@settings(max_examples=examples(30, at_night=1500), deadline=None)
@given(turns(), st.sampled_from([0, 7]))
def test_under_pressure_a_tenant_finds_the_same_as_long_as_its_floor_keeps_all_of_it(
    turns: list[Turn], num_host_blocks: int
) -> None:
    floor = sum(blocks_for(len(turn.asked.prompt) + turn.asked.max_tokens, BLOCK) for turn in turns)
    room = {"num_blocks": floor + LONGEST // BLOCK + 2, "num_host_blocks": num_host_blocks}  # for one other or two
    alone = found(turns, with_others=False, floor=floor, num_blocks=400)
    assert found(turns, with_others=True, floor=floor, **room) == alone


@pytest.mark.parametrize(("floor", "again"), [(0, 0), (8, 24)])
def test_idle_blocks_above_the_floor_reveal_the_demand_of_others(floor: int, again: int) -> None:
    """As the documents say: a tenant that looks whether its prefix is still there learns of others' pressure."""
    mine, long = Ask(0, 25, (), 1), [Ask(1, 26, (n,), 9) for n in range(12)]
    turns = [Turn(mine), Turn(Ask(2, 1, (), 9), [(0, ask) for ask in long]), Turn(mine)]
    assert found(turns, with_others=False, floor=floor, num_blocks=20) == [0, 0, 24]
    assert found(turns, with_others=True, floor=floor, num_blocks=20) == [0, 0, again]
