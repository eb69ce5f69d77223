"""Who had how much of the engine, and how much of it lately."""

import pytest

from gateway.admin.shares import WINDOW, Charges, Shares
from tests.gateway.telemetry.stories import a_sequence


def test_shares_are_of_all_service_in_the_window() -> None:
    shares = Shares()
    shares.tick({"acme": 3.0, "other": 1.0})
    assert (shares.share("acme"), shares.share("other"), shares.share("nobody")) == (0.75, 0.25, 0.0)


def test_service_leaves_the_window_after_a_minute_and_stays_in_the_total() -> None:
    shares = Shares()
    shares.tick({"acme": 5.0})
    for _ in range(WINDOW):
        shares.tick({"acme": 5.0, "other": 1.0})
    assert (shares.share("acme"), shares.share("other")) == (0.0, 1.0)
    for _ in range(WINDOW):
        shares.tick({"acme": 5.0, "other": 1.0})
    assert shares.share("other") == 0.0
    assert shares.total == {"acme": 5.0, "other": 1.0}


def test_a_correction_that_takes_back_more_than_was_charged_lately_is_no_negative_share() -> None:
    shares = Shares()
    shares.tick({"acme": 5.0, "other": 5.0})
    for _ in range(WINDOW):
        shares.tick({"acme": 4.9, "other": 6.0})
    assert (shares.share("acme"), shares.share("other")) == (0.0, 1.0)


def test_charges_are_counted_once_however_often_they_are_looked_at() -> None:
    charges, sequence = Charges(), a_sequence("acme")
    for charged in (1.0, 1.0, 1.5):
        sequence.charged = charged
        charges.look([sequence])
    charges.ended(sequence)
    charges.look([])
    assert charges.total == {"acme": 1.5}


def test_what_a_short_request_used_between_two_looks_is_counted_at_its_end() -> None:
    charges, sequence = Charges(), a_sequence("acme")
    sequence.charged = 0.2
    charges.ended(sequence)
    assert charges.total == {"acme": pytest.approx(0.2)}
