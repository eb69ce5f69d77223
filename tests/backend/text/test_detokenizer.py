"""Streamed text: the same as decoding everything at once, never a broken character, never part of a stop."""

import codecs
from itertools import pairwise

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from backend.text.detokenizer import MAX_HELD_TOKENS, IncrementalDetokenizer, StopMatcher
from backend.text.token_bytes import byte_decoding
from backend.text.tokenizer import Tokenizer
from tests.backend import tiny_tokenizers as tiny

BYTE_LEVEL = Tokenizer(tiny.byte_level_bpe())
FALLBACK = Tokenizer(tiny.byte_fallback_bpe())
FALLBACK_UNSTRIPPED = Tokenizer(tiny.byte_fallback_bpe_unstripped())
METASPACE = Tokenizer(tiny.metaspace_unigram())
BYTE_IDS = {byte: tiny.byte_fallback_bpe().get_vocab()[f"<0x{byte:02X}>"] for byte in range(256)}
EVERY = [BYTE_LEVEL, FALLBACK, FALLBACK_UNSTRIPPED, METASPACE]
TEXTS = st.one_of(
    st.sampled_from(tiny.CORPUS), st.text(), st.text("ab é日😀👩\u200d\u0301\n", max_size=30), st.text(" ", max_size=5)
)


def ids_of(tokenizer: Tokenizer, max_size: int = 60) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=max_size)


def stream(tokenizer: Tokenizer, ids: list[int], **options: object) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, **options)  # type: ignore[arg-type]
    return [*(detokenizer.push([token_id]) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("tokenizer", EVERY)
@given(text=TEXTS)
def test_an_encoded_text_streams_as_it_decodes(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode_text(text, add_special_tokens=False)
    sent = stream(tokenizer, ids)
    assert "".join(sent) == tokenizer.decode(ids)
    if "\ufffd" not in text and tokenizer is not METASPACE:
        assert not any("\ufffd" in part for part in sent)


def complete(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> str:
    """The text of the bytes of these ids, but for a character that is cut at the end."""
    table = tokenizer.token_bytes(skip)
    assert table is not None
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(map(table.__getitem__, ids)))
    return text.removeprefix(" " * tokenizer.strip_left)


@given(ids=ids_of(BYTE_LEVEL), skip=st.booleans(), cut=st.integers(0, 60))
def test_byte_level_streams_any_ids_as_they_decode(ids: list[int], skip: bool, cut: int) -> None:
    whole, decoded = complete(BYTE_LEVEL, ids, skip), BYTE_LEVEL.decode(ids, skip_special_tokens=skip)
    assert decoded in (whole, f"{whole}\ufffd")
    assert "".join(stream(BYTE_LEVEL, ids, skip_special_tokens=skip)) == whole
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, skip_special_tokens=skip)
    assert detokenizer.push(ids[:cut]) + detokenizer.push(ids[cut:]) + detokenizer.flush() == whole


@pytest.mark.parametrize("tokenizer", [FALLBACK, FALLBACK_UNSTRIPPED])
@given(data=st.data())
def test_byte_fallback_differs_from_decoding_only_where_bytes_are_no_text(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    ids = data.draw(ids_of(tokenizer))
    sent, whole = "".join(stream(tokenizer, ids)), tokenizer.decode(ids)
    assert sent == complete(tokenizer, ids)
    if "\ufffd" in whole:
        assert sent.count("\ufffd") <= whole.count("\ufffd")
    else:
        assert sent == whole


def test_a_text_that_a_grammar_matched_keeps_the_space_that_it_begins_with() -> None:
    ids = FALLBACK.encode_text("the the", add_special_tokens=False)
    assert "".join(stream(FALLBACK, ids)) == "the the"
    assert "".join(stream(FALLBACK, ids, keeps_spaces=True)) == " the the"


@given(ids=ids_of(METASPACE))
def test_a_decoder_that_looks_at_neighbours_streams_as_it_decodes(ids: list[int]) -> None:
    assert "".join(stream(METASPACE, ids)) == METASPACE.decode(ids)


@pytest.mark.parametrize("tokenizer", EVERY)
@given(data=st.data(), stop=st.sampled_from([(), ("a",), ("b", "the ")]), min_tokens=st.integers(0, 3))
def test_a_token_pushed_alone_has_the_text_that_it_has_in_a_run(
    tokenizer: Tokenizer, data: st.DataObject, stop: tuple[str, ...], min_tokens: int
) -> None:
    ids, tail = data.draw(ids_of(tokenizer)), data.draw(ids_of(tokenizer, 3))
    in_runs, alone = (
        IncrementalDetokenizer(tokenizer, stop, prompt_tail=tail, min_tokens=min_tokens) for _ in range(2)
    )
    assert alone.push_each(ids) == [text for token_id in ids if (text := in_runs.push([token_id]))]
    assert alone.flush() == in_runs.flush()
    assert alone.stopped == in_runs.stopped


def test_only_decoders_that_treat_tokens_alone_get_a_byte_rule() -> None:
    assert byte_decoding(tiny.byte_level_bpe()) is not None
    assert byte_decoding(tiny.metaspace_unigram()) is None
    assert byte_decoding(tokenizers.Tokenizer(tokenizers.models.BPE())) is None


@pytest.mark.parametrize("text", ["😀", "日", "é", "👩\u200d👩\u200d👧"])
def test_a_character_comes_whole_with_its_last_byte(text: str) -> None:
    sent = stream(FALLBACK, [BYTE_IDS[byte] for byte in text.encode()])
    assert [part for part in sent if part] == list(text)
    assert sent[-1] == ""


def test_a_broken_character_is_sent_once_it_is_certain() -> None:
    detokenizer = IncrementalDetokenizer(FALLBACK)
    assert detokenizer.push([BYTE_IDS[0xF0]]) == ""
    assert detokenizer.push([BYTE_IDS[0x9F]]) == ""
    assert detokenizer.push([BYTE_IDS[0x41]]) == "\ufffdA"
    assert detokenizer.push([BYTE_IDS[0xE6]]) == ""


@pytest.mark.parametrize("tokenizer", EVERY)
@pytest.mark.parametrize("text", ["naïve", "日本", "a 😀"])
def test_of_a_character_that_is_cut_there_is_nothing(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode_text(text, add_special_tokens=False)
    for end in range(len(ids)):
        assert "\ufffd" not in "".join(stream(tokenizer, ids[:end]))


def test_a_real_replacement_character_is_told() -> None:
    for tokenizer in (BYTE_LEVEL, FALLBACK):
        assert "".join(stream(tokenizer, tokenizer.encode_text("a\ufffd", add_special_tokens=False))) == "a\ufffd"


def test_held_tokens_are_bounded_when_no_text_ever_emerges() -> None:
    sent = stream(FALLBACK, [BYTE_IDS[0xF0]] * 1000)
    assert sent[0] == ""
    assert all(part == "\ufffd" for part in sent[1:-1])
    assert sent[-1] == "", "the last is a character that is cut"


def test_the_window_of_a_neighbourly_decoder_is_bounded() -> None:
    widths: list[int] = []

    class Undecodable:
        strip_left = 0

        def token_bytes(self, skip_special_tokens: bool, in_message: bool) -> None:
            return None

        def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
            widths.append(len(token_ids))
            return "\ufffd" * len(token_ids)

    sent = stream(Undecodable(), [1] * 500)  # type: ignore[arg-type]
    assert "".join(sent) == "\ufffd" * (500 - 500 % MAX_HELD_TOKENS), "what still waits may be a character that is cut"
    assert max(widths) <= MAX_HELD_TOKENS + 4


def test_a_continued_prompt_keeps_the_leading_space_and_its_half_character() -> None:
    the = tiny.byte_fallback_bpe().get_vocab()["▁the"]
    assert "".join(stream(FALLBACK, [the, the])) == "the the"
    assert "".join(stream(FALLBACK, [the, the], prompt_tail=[the])) == " the the"
    half = [BYTE_IDS[byte] for byte in "日".encode()]
    assert "".join(stream(FALLBACK, half[1:], prompt_tail=half[:1])) == "日"


@given(text=st.text("abc 日😀", min_size=1, max_size=30), stop=st.text("abc 日😀", min_size=1, max_size=4))
def test_text_ends_before_a_stop_across_tokens(text: str, stop: str) -> None:
    ids = BYTE_LEVEL.encode_text(text, add_special_tokens=False)
    sent = "".join(stream(BYTE_LEVEL, ids, stop=(stop,)))
    assert sent == text.partition(stop)[0]
    kept = "".join(stream(BYTE_LEVEL, ids, stop=(stop,), include_stop=True))
    assert kept == sent + (stop if stop in text else "")


def test_a_stop_within_the_minimum_is_text() -> None:
    ids = [BYTE_LEVEL.encode_text(char, add_special_tokens=False)[0] for char in "axbxc"]
    assert "".join(stream(BYTE_LEVEL, ids, stop=("x",), min_tokens=2)) == "axb"
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, stop=("x",), min_tokens=2)
    assert detokenizer.push(ids) == "axb"
    assert detokenizer.stopped == "x"


ABC = st.text("abc", max_size=40)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


def run(stops: tuple[str, ...], pieces: list[str], include_stop: bool = False) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops, include_stop)
    sent = [matcher.push(piece) for piece in pieces]
    return [*sent, matcher.flush()], matcher.stopped


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
