import re
from collections.abc import Iterator

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from quotas.policy import yaml_nodes
from quotas.policy.problems import Problems, TooManyProblems
from quotas.policy.yaml_nodes import MAX_BYTES, Fields, Items, Node, Scalar, Unreadable, UnsupportedYaml, compose


@pytest.fixture(autouse=True, params=["libyaml", "python"])
def _parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PyYAML comes with libyaml or without; files mean the same."""
    if request.param == "libyaml" and not yaml.__with_libyaml__:
        pytest.skip("this PyYAML has no libyaml")
    monkeypatch.setattr(yaml_nodes, "_LOADER", yaml.CSafeLoader if request.param == "libyaml" else yaml.SafeLoader)
    return


def composed(text: str | bytes) -> Node | None:
    problems = Problems()
    node = compose("f", text.encode() if isinstance(text, str) else text, problems)
    assert not problems.found
    return node


def refusals(text: str) -> list[str]:
    problems = Problems()
    compose("f", text.encode(), problems)
    return [str(problem) for problem in problems.found]


def plain(node: Node | None) -> object:
    if isinstance(node, Fields):
        return {name: plain(value) for name, (_, value) in node.entries.items()}
    return [plain(item) for item in node.nodes] if isinstance(node, Items) else getattr(node, "text", None)


@pytest.mark.parametrize("text", ["no", "010", "1:30", "0x10", "1e3", "2027-01-31", "null", "~", ".inf", "true", "="])
def test_no_scalar_is_given_a_type(text: str) -> None:
    assert plain(composed(f"{text}: {text}")) == {text: text}


def test_every_value_and_key_has_its_place() -> None:
    node = composed("a: 1\nb:\n  - x\n  -  'y'\n")
    assert isinstance(node, Fields)
    mark, items = node.entries["b"]
    assert isinstance(items, Items)
    assert [str(place) for place in (mark, items.mark, *(item.mark for item in items.nodes))] == [
        "f:2:1", "f:3:3", "f:3:5", "f:4:6",
    ]  # fmt: skip


def test_quoted_and_plain_scalars_are_told_apart() -> None:
    node = composed("[a, 'a', \"a\", '', ]")
    assert isinstance(node, Items)
    assert [item.is_plain for item in node.nodes if isinstance(item, Scalar)] == [True, False, False, False]


def test_a_byte_order_mark_and_dos_line_ends_are_read_over() -> None:
    assert plain(composed("\ufeffa: 1\r\nb:\r\n  c: 2\r\n".encode())) == {"a": "1", "b": {"c": "2"}}


@pytest.mark.parametrize("text", ["", "\n", "# only words\n", "---\n", "\ufeff"])
def test_a_file_may_hold_nothing(text: str) -> None:
    assert composed(text) is None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a: &x 1", 'f:1:4: "&x" is an anchor'),
        ("a: &x {b: 1}", 'f:1:4: "&x" is an anchor'),
        ("&x a: 1", 'f:1:1: "&x" is an anchor'),
        ("a: !!str 1", 'f:1:4: "tag:yaml.org,2002:str" is a tag'),
        (
            "a: !!python/object/apply:os.system [ls]",
            'f:1:4: "tag:yaml.org,2002:python/object/apply:os.system" is a tag',
        ),
        ("a: !x {b: 1}", 'f:1:4: "!x" is a tag'),
        ("<<: {a: 1}", "f:1:1: << merges"),
        ("? [a, b]\n: 1", "f:1:3: a key is one word"),
        ("{a: 1}: 1", "f:1:1: a key is one word"),
        ("a: 1\nb: 2\na: 3", 'f:3:1: "a" is a second time here, after line 1'),
        ("\ufb01: 1\nfi: 2", 'f:2:1: "fi" is a second time here, after line 1'),
        ("\u00e9: 1\ne\u0301: 2", "is a second time here, after line 1"),
    ],
)
def test_a_hidden_or_repeated_value_is_refused_at_its_place(text: str, complaint: str) -> None:
    (found,) = refusals(text)
    assert complaint in found


def test_all_refusals_of_a_file_are_found_at_once() -> None:
    assert len(refusals("a: &x 1\nb: *x\nc: !t 2\na: 3\n<<: 4\n")) == 5


def test_an_alias_stands_for_nothing_however_often_it_multiplies() -> None:
    lines = ["a0: &a0 [lol]"] + [f"a{n}: [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 6)]
    problems = Problems()
    node = compose("f", "\n".join(lines).encode(), problems)
    assert len(problems.found) == 1 + 5 * 9
    assert isinstance(node, Fields)
    assert all(isinstance(item, UnsupportedYaml) for item in getattr(node.entries["a5"][1], "nodes", ()))


def test_a_bomb_is_given_up_after_a_hundred_complaints() -> None:
    lines = ["a0: &a0 [lol]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)]
    with pytest.raises(TooManyProblems):
        refusals("\n".join(lines))


def test_the_merge_key_in_quotes_is_a_name_like_another() -> None:
    assert plain(composed('"<<": 1')) == {"<<": "1"}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"a: \xff", "f:1:4: is not UTF-8"),
        ("a: 1".encode("utf-16"), "f:1:1: is not UTF-8"),
        (b"a: 1\nb: \x00", "f:2:4: has a control character, U+0000"),
        ("a: 1\u202e".encode(), "f:1:5: has a control character, U+202E"),
        ("a: 1\u2028b: 2".encode(), "f:1:5: has a control character, U+2028"),
        (b"a: \x1b[2J", "f:1:4: has a control character, U+001B"),
        (b"a:\n\tb: 1", "f:2:1: is indented with a tab"),
        (b"a: 1\n---\nb: 2", "f:2:1: has a second document"),
        (b"a: [1", "is not YAML: "),
        (b"a: 'x", "is not YAML: "),
        (b"a: b: c", "f:1:5: is not YAML: mapping values are not allowed"),
        (b"a: 1\n b: 2", "f:2:3: is not YAML: mapping values are not allowed"),
        (b"a: *nowhere\n- b", "is not YAML: "),
        (b'a: "\\q"', "is not YAML: "),
        (b"%YAML 9.9\n---\na: 1", "f:1:1: is not YAML: found incompatible YAML document"),
        (b"@a: 1", "f:1:1: is not YAML: "),
        (b"[" * 100_000, "f:1:13: is nested deeper than 12 levels"),
        (b"{a: " * 100_000, "f:1:49: is nested deeper than 12 levels"),
        (b"".join(b" " * n + b"a:\n" for n in range(50)), "is nested deeper than 12 levels"),
        (b"#" * (MAX_BYTES + 1), "f: is larger than 4 MiB"),
    ],
)
def test_a_file_of_which_nothing_can_be_made_says_where_and_why(content: bytes, complaint: str) -> None:
    with pytest.raises(Unreadable, match=re.escape(complaint)):
        compose("f", content, Problems())


def test_the_number_of_values_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_nodes, "MAX_NODES", 100)
    with pytest.raises(Unreadable, match="f:100:3: has more than 100 values"):
        compose("f", b"- a\n" * 1000, Problems())


def fuzz(content: bytes) -> None:
    try:
        compose("f", content, Problems())
    except (Unreadable, TooManyProblems):
        return


@settings(deadline=None)
@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "replace")))
def test_any_content_is_read_or_refused(content: bytes) -> None:
    fuzz(content)


@settings(deadline=None)
@given(st.text("ab:-? ,[]{}#&*!|>'\"%@`\n\t\r\\<~0", max_size=40))
def test_any_punctuation_is_read_or_refused(text: str) -> None:
    fuzz(text.encode())
