from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quotas.policy import policy_file
from quotas.policy.policy import Policy
from quotas.policy.policy_file import PolicyError, PolicyReader
from quotas.policy.yaml_nodes import Composer
from tests.examples import examples

SHAPES = {
    "plain": "tenants:\n  a:\n    weight: 2\n  b: {weight: 3}\n",
    "between": "classes: {x: }\ntenants: # who\n\n  # first\n  a:\n    weight: 2\n# out\n  b:\ndefaults: {weight: 4}\n",
    "wide": "tenants:\n      a:\n            weight: 2\n      b: {weight: 3}",
    "returns": "tenants:\r\n  a:\r\n    weight: 2\r\n  b: {weight: 3}\r\n",
    "return alone": "tenants:\n  a: {weight: 2}\r  b: {weight: 3}\n",
    "marked": "%YAML 1.2\n---\ntenants:\n  a:\n    weight: 2\n  b: {weight: 3}\n...\n",
    "byte order": "\ufefftenants:\n  a:\n    weight: 2\n",
    "flow over lines": "tenants:\n  a: {weight: 2,\n  models: [x]}\n  b: {weight: 3}\n",
    "flow at the margin": "tenants:\n  a: {weight: 2,\nmodels: [x]}\n  b: {weight: 3}\n",
    "quoted over lines": 'tenants:\n  a: {models: ["x\n  b: y"]}\n  b: {weight: 3}\n',
    "quoted at the margin": "defaults: {models: ['x\ntenants:\n  a: y']}\n",
    "literal": "tenants:\n  a:\n    prefix_cache:\n      pinned:\n      - |+\n        b: c\n\n         d\n\n  b:\n",
    "explicit keys": "tenants:\n  ? a\n  : {weight: 2}\n  ? b\n  : {weight: 3}\n",
    "explicit top": "? tenants\n: a: {weight: 2}\n",
    "flow top": "{tenants:\n  {a: {weight: 2}}}\n",
    "flow top in lines": "{\ntenants:\n  a:\n}\n",
    "one line": "tenants: {a: {weight: 2}, b: {weight: 3}}\n",
    "quoted names": "tenants:\n  'a': {weight: 2}\n  \"b\": {weight: 3}\n",
    "names with spaces": "tenants:\n  a : {weight: 2}\n  b\t: {weight: 3}\n",
    "empty": "tenants:\n",
    "only a comment": "tenants:\n  # nobody\n",
    "list": "tenants:\n  - a\n  - b\n",
    "list at the margin": "tenants:\n- a\n- b\n",
    "scalar": "tenants:\n  a\n  b\n",
    "tabs": "tenants:\n\ta:\n\t\tweight: 2\n",
    "tab within": "tenants:\n  a:\n  \tweight: 2\n",
    "one space less": "tenants:\n  a: {weight: 2}\n b: {weight: 3}\n",
    "one space more": "tenants:\n  a: {weight: 2}\n   b: {weight: 3}\n",
    "anchored": "tenants: &t\n  a: {weight: 2}\n",
    "anchor within": "tenants:\n  a: &x {weight: 2}\n  b: *x\n",
    "merged": "tenants:\n  a: {weight: 2}\n  <<: {b: {weight: 3}}\n",
    "named twice": "tenants:\n  a: {weight: 2}\n  b:\n  a: {weight: 3}\n",
    "two mappings of tenants": "tenants:\n  a: {weight: 2}\ntenants:\n  b: {weight: 3}\n",
    "two documents": "tenants:\n  a: {weight: 2}\n---\ntenants:\n  b: {weight: 3}\n",
    "a key twice": "tenants:\n  a: {keys: {k: }}\n  b: {keys: {k: }}\n",
    "alike": "tenants:\n  a: {weight: x}\n  b: {weight: x}\n  c: {weight: 2}\n  d: {weight: 2}\n",
    "alike with keys": "tenants:\n  a: {keys: {k: {scopes: [limits]}}}\n  b: {keys: {k: {scopes: [limits]}}}\n",
    "control": "tenants:\n  a: {weight: 2}\n  b: {models: ['\x07']}\n",
    "no text": "tenants:\n  a: {weight: 2}\n  b: {models: ['\udcff']}\n",
    "unfinished": "tenants:\n  a: {weight: 2}\n  b: {weight: \n",
    "deep": "tenants:\n  a: " + "{x: " * 10 + "}" * 10 + "\n  b: " + "{x: " * 9 + "}" * 9 + "\n",
    "long name": f"tenants:\n  {'n' * 65}: {{weight: 2}}\n  {'m' * 64}: {{weight: 2}}\n",
}


def read(reader: PolicyReader, sources: Mapping[str, bytes]) -> Policy | str:
    try:
        return reader.parse(sources)
    except PolicyError as error:
        return str(error)


def read_whole(sources: Mapping[str, bytes]) -> Policy | str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy_file, "cut", lambda *_: None)
        return read(PolicyReader(), sources)


@pytest.mark.parametrize("text", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("other", ["", "tenants:\n  c: {weight: 7}\n", "tenants:\n  b: {keys: {k: }}\n"])
def test_a_file_means_the_same_by_tenants_as_it_does_whole(text: str, other: str) -> None:
    sources = {"a": text.encode("utf-8", "surrogateescape")} | ({"b": other.encode()} if other else {})
    assert read(PolicyReader(), sources) == read_whole(sources)


@pytest.mark.parametrize("second", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("first", ["plain", "between", "quoted names", "alike", "literal", "a key twice"])
def test_an_edit_means_the_same_after_any_earlier_reading(first: str, second: str) -> None:
    reader = PolicyReader()
    read(reader, {"a": SHAPES[first].encode()})
    sources = {"a": second.encode("utf-8", "surrogateescape")}
    assert read(reader, sources) == read_whole(sources)
    assert read(reader, sources) == read_whole(sources), "a mistake is told as often as it is read"


FORMS = {  # of tenants whose texts differ in words: those that are values, and those that only look it
    "values": "\n    weight: {0}\n    models: [m-{0}]\n    limits: {{requests: {0}/min, tokens: [{0}k/min, {0}/day]}}",
    "items": "\n    models:\n      - m{0}\n      - n{0}\n    max_n: {0}",
    "flow": " {{weight: {0}, models: [m{0}]}}",
    "a wrong one": " {{weight: {0}, max_n: {0}}}",
    "an unknown field": " {{weight: {0}, wieght: {0}}}",
    "twice in a list": " {{models: [m{0}, m{0}]}}",
    "comments": "\n    # was {0}\n    weight: {0} # {0}",
    "quotes": "\n    models: ['a {0}, b', \"c {0}]\"]",
    "a sentence": "\n    models: [a b{0}, {0} ]",
    "block": "\n    prefix_cache:\n      pinned:\n      - |\n        say {0}\n        {0}\n      - >-\n        as {0}",
    "over lines": "\n    weight:\n      {0}",
    "continued": "\n    models: [a\n     b{0}, c\n     ]",
    "keys": "\n    keys: {{k: {{expires: {0}}}}}",
    "own keys": "\n    keys: {{k{0}: {{scopes: [limits]}}}}",
    "aliases": "\n    weight: *x {0}",
    "tags": "\n    weight: !x {0}",
    "a key of many": "\n    ? {0}\n    : {0}",
    "nothing": "\n    weight: {0}\n    models:",
    "brackets of blocks": "\n    models: [{0}]\n    weight: {0}]",
    "two documents": "\n    weight: {0}\n--- {0}\n",
    "less indented": "\n   weight: {0}",
    "no text": "\n    weight: {0}\n    models: ['\udcff']",
    "control": "\n    weight: {0}\n    models: [\x00, {0}]",
    "returns": "\r\n    weight: {0}\r\n    max_n: {0}\r",
    "more mistakes than are told": f"\n    models: [{'é, ' * 120}{{0}}]",
}


@pytest.mark.parametrize("body", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("words", [("1", "2", "3", "4"), ("7", "0", "x", "8"), ("a", "true", "5.5", "2031-01-31")])
@pytest.mark.parametrize("indent", ["  ", "    "])
def test_texts_that_differ_in_words_mean_what_each_would(body: str, words: tuple[str, ...], indent: str) -> None:
    texts = [f"{indent}t{number}:{body.format(word)}\n" for number, word in enumerate(words)]
    sources = {"a": ("tenants:\n" + "".join(texts)).encode("utf-8", "surrogateescape")}
    reader = PolicyReader()
    assert read(reader, sources) == read_whole(sources)
    again = sources | {"b": b"defaults: {max_n: 3}\n"}
    assert read(reader, again) == read_whole(again)


def test_a_text_means_nothing_where_it_is_indented_otherwise() -> None:
    sources = {"a": b"tenants:\n  t1:\n   weight: 2\n", "b": b"tenants:\n    t2:\n   weight: 2\n"}
    assert isinstance(read_whole(sources), str)
    assert read(PolicyReader(), sources) == read_whole(sources)


def test_yaml_is_asked_once_of_tenants_whose_texts_differ_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    composed = list[int]()
    run = Composer.run
    monkeypatch.setattr(Composer, "run", lambda self, content: composed.append(len(content)) or run(self, content))
    content = many(distinct, count=3000)
    assert PolicyReader().parse({"a": content}).tenant("t2999").weight == distinct(2999)
    assert sum(composed) < len(content) / 4, "blank lines for most of them"


LINES = [
    "tenants:", "  a:", "  b: {weight: 3}", "  c: {weight: 3}", "  d: {weight: x}", "    weight: 2", "    weight: 5",
    "    limits: {tokens: 5/min}", "    keys: {k: }", "    keys:", "      k:", "  # note", "# note", "", "defaults:",
    "  weight: 4", "classes: {x: , y: }", "    highest_class: y", "  e: {models: [x,", "    y]}", "  f: 'g", "h'",
    "  i: {weight: 6, models: [m1]}", "  j: {weight: 7, models: [m2]}", "  k: {weight: y, models: [m 3]}",
    "    prefix_cache: {pinned: [|", "  'q': {weight: 1}", "  ? r", "  : {weight: 1}", "\ttab", " s: {weight: 1}",
    "---", "...",
]  # fmt: skip


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.lists(st.sampled_from(LINES), max_size=14), min_size=1, max_size=4))
def test_any_lines_mean_the_same_by_tenants_as_they_do_whole(editions: list[list[str]]) -> None:
    reader = PolicyReader()
    for lines in editions:
        sources = {"a": "\n".join(["tenants:", "  z: {weight: 9}", *lines]).encode(), "b": b"tenants:\n  y:\n"}
        assert read(reader, sources) == read_whole(sources)


def many(weight: Callable[[int], float], first: int = 0, count: int = 300) -> bytes:
    tenants = (f"  t{number}:\n    weight: {weight(number)}\n" for number in range(first, first + count))
    return ("tenants:\n" + "".join(tenants)).encode()


def distinct(number: int) -> float:
    return round(1 + number / 1000, 3)


def test_an_edit_of_one_tenant_reads_one_tenant() -> None:
    reader = PolicyReader()
    sources = {"a": many(distinct), "b": many(distinct, 300), "c": b"defaults: {max_n: 4}\n"}
    before = reader.parse(sources)
    assert (len(before.tenants), reader.known.num_read) == (600, 600)
    edited = sources | {"b": sources["b"].replace(b"weight: 1.45\n", b"weight: 7\n")}
    after = reader.parse(edited)
    assert reader.known.num_read == 601
    assert after == PolicyReader().parse(edited)
    assert [name for name, tenant in after.tenants.items() if tenant is not before.tenants[name]] == ["t450"]


def test_an_edit_with_a_mistake_reads_what_was_edited_and_says_where_it_stands() -> None:
    reader = PolicyReader()
    content = many(distinct)
    reader.parse({"a": content})
    for num_read in (301, 302):
        assert read(reader, {"a": content.replace(b"1.123\n", b"x\n")}) == (
            'a:249:13: tenants.t123.weight: "x" is not a number such as 1 or 2.5'
        )
        assert reader.known.num_read == num_read
    reader.parse({"a": content})
    assert reader.known.num_read == 303


def test_tenants_that_are_added_moved_or_removed_leave_the_others_known() -> None:
    reader = PolicyReader()
    reader.parse({"a": many(distinct)})
    lines = many(distinct).splitlines(keepends=True)
    for edited in (lines[:1] + lines[11:], lines[:1] + lines[101:] + lines[1:101], [*lines, b"  new: {weight: 8}\n"]):
        sources = {"a": b"".join(edited)}
        assert reader.parse(sources) == PolicyReader().parse(sources)
    assert reader.known.num_read == 300 + 5 + 1, "the five that had been removed came back"


def test_all_tenants_are_read_again_where_the_defaults_change() -> None:
    reader = PolicyReader()
    tenants = {"a": many(distinct)}
    reader.parse(tenants | {"b": b"defaults: {max_n: 4}\n"})
    assert reader.parse(tenants | {"b": b"defaults: {max_n: 5}\n"}).tenant("t7").max_n == 5
    assert reader.known.num_read == 600


def test_tenants_that_differ_in_their_names_alone_are_read_once() -> None:
    reader = PolicyReader()
    found = reader.parse({"a": many(lambda number: number % 3 + 1)})
    assert reader.known.num_read == 3
    assert [tenant.name for tenant in found.tenants.values()] == [f"t{number}" for number in range(300)]
    assert [tenant.weight for tenant in found.tenants.values()] == [number % 3 + 1 for number in range(300)]


def test_the_number_of_values_is_bounded_by_file_however_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("yaml_nodes", "parser"):
        monkeypatch.setattr(f"quotas.policy.{module}.MAX_NODES", 1203)
    reader = PolicyReader()
    assert len(reader.parse({"a": many(distinct)}).tenants) == 300
    edited = {"a": many(distinct, count=301)}
    assert read(reader, edited) == read_whole(edited) == "a:602:3: has more than 1203 values"


def test_files_that_are_read_again_unchanged_are_the_same_policy() -> None:
    reader = PolicyReader()
    sources = {"a": many(distinct), "b": b"defaults: {max_n: 4}\n"}
    before = reader.parse(sources)
    assert reader.parse(dict(sources)) is before
    assert read(reader, sources | {"a": b"tenants: x\n"}) == read_whole(sources | {"a": b"tenants: x\n"})
    assert read(reader, sources) == read_whole(sources)
    assert read(reader, {"a": sources["a"]}) == read_whole({"a": sources["a"]})


@pytest.mark.parametrize("second", [b"  t7:\n    weight: 9\n", b"  other:\n    keys: {k3: }\n"], ids=["name", "key"])
def test_a_name_and_a_key_are_one_files_however_the_files_were_read_before(second: bytes) -> None:
    reader = PolicyReader()
    keyed = many(distinct) + b"  keyed:\n    keys: {k3: }\n"
    reader.parse({"a": keyed, "b": b"tenants:\n  z:\n    weight: 3\n"})
    sources = {"a": keyed, "b": b"tenants:\n" + second}
    told = read(reader, sources)
    assert told == read_whole(sources)
    assert isinstance(told, str)
