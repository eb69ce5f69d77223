"""Prompts are named a part at a time, by who may share them."""

from backend.paged_kv.block_names import BlockNames
from backend.scheduler.sequence import Sequence
from gateway.api.prompt_names import BLOCKS_PER_TURN, TOKENS_PER_TURN, PromptNames
from tests.backend.sequences import make_sequence

SIZE = 4


def a_sequence(length: int, name: str = "r") -> Sequence:
    return make_sequence(name, "acme", list(range(length)), 4, [])


def named(names: PromptNames, sequence: Sequence, scope: str, salt: str | None = None) -> list[int]:
    """The ordinals of the names of its blocks, all of which are named at once."""
    names.begin([sequence], scope, salt)
    assert names.name_some([sequence])
    return [name.ordinal for name in sequence.block_names]


def test_only_full_blocks_have_names() -> None:
    names = PromptNames(BlockNames(bytes(32), SIZE), SIZE)
    assert [len(named(names, a_sequence(length), "acme")) for length in (1, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_names_are_shared_within_a_scope_and_a_salt_and_nowhere_else() -> None:
    names, ordinals = PromptNames(BlockNames(bytes(32), SIZE), SIZE), set[int]()
    sequences = []  # names are forgotten with the last sequence that has them
    for scope, salt in (("acme", None), ("beta", None), ("acme", "x"), ("acmex", None), ("beta", "x"), ("acme", "y")):
        sequences += [a_sequence(12), a_sequence(13)]
        first, second = (named(names, sequence, scope, salt) for sequence in sequences[-2:])
        assert first == second and ordinals.isdisjoint(first)
        ordinals.update(first)
    assert len(ordinals) == 6 * 3


def test_a_long_request_of_any_prompts_is_named_a_part_at_a_time() -> None:
    names = PromptNames(BlockNames(bytes(32), SIZE), SIZE)
    lengths = [5 * SIZE, 300 * SIZE + 1, 2, 100 * SIZE, SIZE]
    sequences = [a_sequence(length) for length in lengths]
    names.begin(sequences, "acme", None)
    turns, before = 0, 0
    while not names.name_some(sequences):
        turns += 1
        count = sum(len(one.block_names) for one in sequences)
        assert count - before == BLOCKS_PER_TURN
        before = count
    assert [len(one.block_names) for one in sequences] == [5, 300, 0, 100, 1]
    assert turns == 406 // BLOCKS_PER_TURN
    assert names.name_some(sequences), "once more changes nothing"


def test_of_large_blocks_fewer_are_named_at_a_time() -> None:
    for size in (TOKENS_PER_TURN // 2, 2 * TOKENS_PER_TURN):
        names, sequence = PromptNames(BlockNames(bytes(32), size), size), a_sequence(3 * size)
        names.begin([sequence], "acme", None)
        assert not names.name_some([sequence])
        assert len(sequence.block_names) == max(1, TOKENS_PER_TURN // size)


def test_blocks_of_prompts_that_are_scored_are_shared_by_the_answers_to_one_alone() -> None:
    names, sequences = PromptNames(BlockNames(bytes(32), SIZE), SIZE), [a_sequence(3 * SIZE, name) for name in "abcd"]
    for sequence in sequences[:2]:
        sequence.prompt_group = "a"
    names.begin_apart(sequences, "scope")
    names.name_some(sequences)
    first, second, third, fourth = ([name.ordinal for name in sequence.block_names] for sequence in sequences)
    assert first == second
    assert not {*first} & {*third} and not {*third} & {*fourth}
    assert not {*first, *third, *fourth} & {*named(names, a_sequence(3 * SIZE), "scope")}
