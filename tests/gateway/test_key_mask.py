import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from gateway import key_mask
from gateway.errors import BadRequest, RouteNotFound
from gateway.http.responses import request_id
from gateway.key_mask import MASK, hide, masked
from gateway.quoting import quoted
from gateway.settings.settings import Settings
from gateway.telemetry.logs.logs import logging_to
from gateway.tenants.auth import new_key

KEY, _ = new_key("acme", b"pepper")
around = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)


def test_a_quote_that_is_cut_says_so_and_holds_no_key() -> None:
    assert [quoted(text, 5) for text in ("a'b", "12345", "123456")] == ['"a\'b"', "'12345'", "'12345…'"]
    assert quoted(f"{'a' * 70}{KEY}") == f"'{'a' * 70}{MASK}'"
    assert KEY[:15] not in quoted(KEY, 20)


@given(around, around)
def test_a_key_is_masked_between_any_texts(before: str, behind: str) -> None:
    text = masked(f"{before}{KEY}{behind}")
    assert KEY not in text and KEY[-20:] not in text
    assert MASK in text


@pytest.mark.parametrize(
    "text",
    [
        f"/v1/models/{KEY}/x",
        f"https://{KEY}@host/v1?key={KEY}&other=1",
        f"Bearer{KEY}",
        f"'{KEY[:30]}",
        KEY.replace("-", "%2D"),
        KEY.upper(),
        f"/V1/MODELS/{KEY.upper().replace('-', '%2D')}",
        "sk-proj-0123456789abcdefghijklmnop",
        "sk-sluice-planted",
        "sluice-admin-0123456789abcdef",
    ],
    ids=[
        "path",
        "URL",
        "header",
        "cut",
        "escaped",
        "upper case",
        "escaped in upper case",
        "another's",
        "the demo's",
        "the admin's",
    ],
)
def test_forms_of_a_key(text: str) -> None:
    assert MASK in masked(text)
    assert not any(part in masked(text) for part in (KEY[20:], KEY[20:].upper(), "planted", "0123456789"))


@pytest.mark.parametrize(
    "text", ["", "task-management-of-a-long-project-name", "sk-", "sk-short", "/v1/models/desk-lamp"]
)
def test_a_text_that_is_no_key_stays(text: str) -> None:
    assert masked(text) == text


def test_errors_say_no_key_and_ids_are_none() -> None:
    for error in (RouteNotFound(f"Unknown request URL: GET /v1/{KEY}."), BadRequest(f"no {KEY}", param=KEY)):
        told = (error.to_body().decode(), str(error), repr(error), error.discreet_message, error.param or "")
        assert not any(KEY in text for text in told)
    assert KEY.encode() not in request_id(KEY.encode())


def test_secrets_of_the_settings_are_masked_in_what_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_mask, "_hidden", [])
    settings = Settings(demo_key=SecretStr("Tr0ub4dor&3-of-mine"), log_format="text")
    with (tmp_path / "log").open("w") as file, logging_to(file.fileno(), settings):
        logging.getLogger("gateway").warning("GET /%s", "Tr0ub4dor&3-of-mine")
        try:
            raise ValueError(KEY)
        except ValueError:
            logging.getLogger("gateway").exception("failed with %s", KEY)
    logged = (tmp_path / "log").read_text()
    assert "Tr0ub4dor" not in logged and KEY not in logged and logged.count(MASK) == 3
    assert "Tr0ub4dor" not in BadRequest("not Tr0ub4dor&3-of-mine").message


def test_a_short_secret_masks_no_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_mask, "_hidden", [])
    hide(["demo"])
    assert masked("the demo") == "the demo"
