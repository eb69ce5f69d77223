"""Actions that asks name, with the tools for them and what they take."""

from __future__ import annotations

from typing import NamedTuple


class Action(NamedTuple):
    """A tool's name, the kinds of values of its parameters, and asks in which {0} stands for the first one's value."""

    name: str
    parameters: dict[str, str]
    asks: tuple[str, ...]


ACTIONS = (
    Action("set_timer", {"minutes": "small"}, (
        "Set a timer for {0} minutes.", "Start a timer of {0} minutes.", "Set a {0} minute timer.")),
    Action("send_message", {"to": "person", "text": "text"}, (
        'Send {0} the message "{1}".', "Send a message to {0}: {1}", "Tell {0}: {1}")),
    Action("turn_light", {"room": "room", "state": "switch"}, (
        "Turn the light in the {0} {1}.", "Switch the light in the {0} {1}.")),
    Action("convert", {"amount": "number", "from": "unit", "to": "unit"}, (
        "Convert {0} {1} to {2}.", "How much is {0} {1} in {2}?")),
)  # fmt: skip
CHOICES = {
    "switch": ("on", "off"),
    "unit": ("dollars", "euros", "pounds", "yen", "miles", "metres", "grams"),
    "room": ("kitchen", "bedroom", "garden", "hall", "office", "bathroom"),
}
