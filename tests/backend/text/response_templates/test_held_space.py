from hypothesis import given
from hypothesis import strategies as st

from backend.text.response_templates.held_space import HeldSpace


@given(st.lists(st.text(st.sampled_from(" \n\tab"), min_size=1), max_size=12))
def test_all_comes_but_the_space_at_the_end(pieces: list[str]) -> None:
    held, text = HeldSpace(), ""
    for piece in pieces:
        text += held.push(piece, piece.rstrip())
    assert text == "".join(pieces).rstrip()


def test_space_alone_is_not_put_together() -> None:
    held = HeldSpace()
    assert [held.push(" " * 80, "") for _ in range(1000)] == [""] * 1000
    assert len(held._pieces) == 1000
    assert held.push("x", "x") == " " * 80_000 + "x"
