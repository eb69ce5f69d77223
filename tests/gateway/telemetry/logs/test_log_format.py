import json
import logging
import sys
from typing import Any

import pytest

from gateway.telemetry.logs.log_format import JsonFormat, TextFormat, unquoted

HOSTILE = 'x"}\n{"level":"CRITICAL"}\r\n12:00:00 CRITICAL\x1b[31m\x9b31m\u2028\u202e\ud800'


def a_record(message: str = "hello", **more: Any) -> logging.LogRecord:
    record = logging.LogRecord("gateway.x", logging.WARNING, "", 0, message, None, None)
    record.created = 1_800_000_000.125
    vars(record).update(more)
    return record


def failure(prompt: str, output: str) -> Any:
    try:
        try:
            int(prompt)
        except ValueError as error:
            raise KeyError(output) from error
    except KeyError:
        return sys.exc_info()


def test_a_json_line_has_the_time_in_utc_the_message_and_the_fields() -> None:
    line = json.loads(JsonFormat().format(a_record(fields={"tenant": "acme", "seconds": 0.5, "model": None})))
    assert line == {
        "time": "2027-01-15T08:00:00.125+00:00",
        "level": "WARNING",
        "logger": "gateway.x",
        "message": "hello",
        "tenant": "acme",
        "seconds": 0.5,
        "model": None,
    }


@pytest.mark.parametrize("where", ["message", "field"])
def test_nothing_that_is_logged_ends_a_json_line_or_adds_a_key(where: str) -> None:
    record = a_record(HOSTILE) if where == "message" else a_record(fields={"model": HOSTILE})
    line = JsonFormat().format(record)
    assert "\n" not in line and "\x1b" not in line
    assert json.loads(line)["level"] == "WARNING"


def test_values_that_json_cannot_hold_are_written_as_text() -> None:
    line = JsonFormat().format(a_record(fields={"number": 2**100, "object": object, "text": "\ud800"}))
    assert json.loads(line)["number"] == 2**100


@pytest.mark.parametrize("where", ["message", "field", "exception"])
def test_nothing_that_is_logged_begins_a_line_of_text(where: str) -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        info = sys.exc_info()
    record = {
        "message": a_record(HOSTILE),
        "field": a_record(fields={"model": HOSTILE}),
        "exception": a_record(exc_info=info),
    }[where]
    first, *others = TextFormat().format(record).split("\n")
    assert first.count("WARNING  ") == 1
    assert all(line.startswith("    ") and line.isprintable() for line in others)
    assert first.isprintable()


def test_a_line_of_text_shows_the_fields_that_have_a_value() -> None:
    line = TextFormat().format(a_record(fields={"tenant": "a b", "seconds": 0.25, "model": None, "empty": ""}))
    assert line.endswith("WARNING  hello tenant='a b' seconds=0.25 empty=''")


def test_colour_is_only_for_a_setting_that_asks_for_it() -> None:
    assert "\033" not in TextFormat().format(a_record())
    assert "\033[33mWARNING" in TextFormat(colour=True).format(a_record())


def test_an_exception_that_may_quote_a_client_is_shown_without_what_it_says() -> None:
    info = failure("secret one", "secret two")
    discreet = a_record(exc_info=info, discreet=True)
    for formatted in (JsonFormat().format(discreet), TextFormat().format(discreet)):
        assert "secret" not in formatted
        assert "builtins.ValueError" in formatted and "builtins.KeyError" in formatted
        assert "in failure" in formatted
    for formatted in (JsonFormat(quotes=True).format(discreet), JsonFormat().format(a_record(exc_info=info))):
        assert "KeyError: 'secret two'" in formatted


def test_a_cause_that_was_suppressed_stays_so() -> None:
    error = KeyError()
    error.__context__, error.__suppress_context__ = ValueError(), True
    assert unquoted(error) == "builtins.KeyError"
