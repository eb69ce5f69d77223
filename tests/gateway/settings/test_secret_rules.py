import base64
import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.settings.secret_rules import placeholder, weakness


@pytest.mark.parametrize(
    ("secret", "why"),
    [
        ("REPLACE_WITH_64_HEXADECIMAL_DIGITS", "placeholder"),
        ("changeme-changeme-2026-changeme-now", "placeholder"),
        ("<the pepper of this deployment, 32 bytes>", "placeholder"),
        ("${SLUICE_PEPPER_OF_THIS_DEPLOYMENT}", "placeholder"),
        ("your-own-pepper-of-thirty-two-bytes", "placeholder"),
        ("xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx", "distinct"),
        ("0000000000000000000000000000000000001234", "distinct"),
        ("pepper-and-salt!" * 2, "repeats"),
        ("0123456789abcdef" * 4, "repeats"),
        ("abcdefghijklmnopqrstuvwxyz0123456789", "counts"),
        ("zyxwvutsrqponmlkjihgfedcba9876543210", "counts"),
    ],
)
def test_a_guessable_secret_is_named_and_not_repeated(secret: str, why: str) -> None:
    said = weakness(secret)
    assert said is not None
    assert why in said
    assert secret not in said
    assert "openssl rand -hex 32" in said


@given(st.binary(min_size=32, max_size=32).filter(lambda raw: len(set(raw)) > 24))
def test_a_generated_secret_passes(raw: bytes) -> None:
    for made in (raw.hex(), base64.b64encode(raw).decode(), secrets.token_hex(16)):
        assert weakness(made) is None


def test_a_chosen_word_is_no_placeholder() -> None:
    assert placeholder("correct-horse-battery") is None
