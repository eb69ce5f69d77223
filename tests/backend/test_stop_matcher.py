"""Stop strings: found wherever text is cut, never leaked, held back no longer than needed."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.stop_matcher import StopMatcher

ABC = st.text("abc", max_size=40)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


def run(stops: tuple[str, ...], pieces: list[str], include_stop: bool = False) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops, include_stop)
    sent = [matcher.push(piece) for piece in pieces]
    return [*sent, matcher.finish()], matcher.stopped


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """The definition, tried at every end: the index after the stop that is complete first, and of those the longest."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return end, max(complete, key=len)
    return None


@given(text=ABC, stops=STOPS, cuts=st.lists(st.integers(0, 40)), include_stop=st.booleans())
def test_text_ends_before_the_stop_that_is_complete_first_however_it_is_cut(
    text: str, stops: tuple[str, ...], cuts: list[int], include_stop: bool
) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    sent, stopped = run(stops, pieces, include_stop)
    found = first_stop(text, stops)
    if found is None:
        assert ("".join(sent), stopped) == (text, None)
    else:
        end, stop = found
        assert ("".join(sent), stopped) == (text[: end if include_stop else end - len(stop)], stop)


@given(text=ABC, stops=STOPS)
def test_holds_back_exactly_what_could_become_a_stop(text: str, stops: tuple[str, ...]) -> None:
    matcher = StopMatcher(stops)
    seen = sent = ""
    for char in text:
        seen += char
        sent += matcher.push(char)
        if matcher.stopped:
            return
        held = len(seen) - len(sent)
        longest = max(k for stop in stops for k in range(len(stop)) if seen.endswith(stop[:k]))
        assert held == longest


@pytest.mark.parametrize(
    ("stops", "text", "sent", "stopped"),
    [
        (("\n\n",), "one\n\ntwo", "one", "\n\n"),
        (("User:", "</s>"), "Hi </s> User:", "Hi ", "</s>"),
        (("aab",), "aaab", "a", "aab"),
        (("abc", "b"), "abc", "a", "b"),
        (("bc", "abc"), "abc", "", "abc"),
        (("😀",), "so 😀 !", "so ", "😀"),
        (("xyz",), "xy", "xy", None),
    ],
)
def test_examples(stops: tuple[str, ...], text: str, sent: str, stopped: str | None) -> None:
    assert ("".join(run(stops, [text])[0]), run(stops, [text])[1]) == (sent, stopped)
    assert ("".join(run(stops, list(text))[0]), run(stops, list(text))[1]) == (sent, stopped)


def test_nothing_follows_a_stop() -> None:
    assert run(("b",), ["a", "b", "c", "b"]) == (["a", "", "", "", ""], "b")


class Counted(str):
    """A stop that knows how often its characters were looked at."""

    __slots__ = ()
    looks = 0

    def __getitem__(self, key: object) -> str:
        Counted.looks += 1
        return str.__getitem__(self, key)  # type: ignore[index]


@pytest.mark.parametrize("count", [1, 8, 64])
def test_text_that_begins_every_stop_again_and_again_costs_the_same_however_many_there_are(count: int) -> None:
    stops = tuple(Counted("ab" * 50 + "c" * number) for number in range(1, count + 1))
    matcher = StopMatcher(stops)
    for piece in ["ab" * 49 + "d"] * 3:
        matcher.push(piece)
    Counted.looks = 0
    for piece in ["ab" * 49 + "d"] * 1000:
        matcher.push(piece)
    assert Counted.looks == 0  # the automaton is there: the stops themselves are not looked at


def test_a_stop_that_almost_matches_everywhere_costs_amortised_constant_work() -> None:
    steps = 0

    class Counted(str):
        __slots__ = ()

        def __getitem__(self, key: object) -> str:
            nonlocal steps
            steps += 1
            return str.__getitem__(self, key)  # type: ignore[index]

    matcher = StopMatcher((Counted("a" * 1000 + "b"),))
    for char in "a" * 1000 + ("c" + "a" * 999) * 3:
        matcher.push(char)
    assert steps < 10 * 4000
