"""The faults of a scenario, each a line such as `kill gateway`, `delay store 60ms` or `edit tenants.light.weight 2`."""

import json
import signal
from collections.abc import Callable
from functools import partial

from labs.faults.site import LINKS, Site
from quotas.policy import units

NOT_A_POLICY = "tenants: [what is this"


def _signal(number: signal.Signals) -> Callable[[Site, str], None]:
    def send(site: Site, target: str) -> None:
        for process in site.named(target):
            process.signal(number)

    return send


def _start(site: Site, target: str) -> None:
    for process in site.named(target):
        process.start()


def _fill_disk(site: Site, target: str) -> None:
    for process in site.named(target):
        process.limit_files(0)


def _free_disk(site: Site, target: str) -> None:
    for process in site.named(target):
        process.limit_files(None)


def _starve(site: Site, target: str, room: str) -> None:
    for process in site.named(target):
        process.limit_memory(units.size(room))


def _feed(site: Site, target: str) -> None:
    for process in site.named(target):
        process.limit_memory(None)


def _delay(site: Site, link: str, seconds: str) -> None:
    for proxy in site.links[link]:
        proxy.latency = units.positive_duration(seconds)


def _slow(site: Site, link: str, bytes_per_second: str) -> None:
    for proxy in site.links[link]:
        proxy.rate = float(units.size(bytes_per_second))


def _each(method: str) -> Callable[[Site, str], None]:
    def act(site: Site, link: str) -> None:
        for proxy in site.links[link]:
            getattr(proxy, method)()

    return act


def _edit(site: Site, field: str, value: str) -> None:
    """Set a field of the policy; its value is JSON or a word."""
    *parents, last = field.split(".")
    place = site.policy
    for name in parents:
        place = place.setdefault(name, {})
    try:
        place[last] = json.loads(value)
    except ValueError:
        place[last] = value
    site.write_policy()


def _spoil(site: Site, _: str) -> None:
    site.write_policy(NOT_A_POLICY)


def _jump(site: Site, _: str, seconds: str) -> None:
    """Move the calendar forward, or with a minus backward."""
    sign = -1 if seconds.startswith("-") else 1
    site.set_clock(sign * units.positive_duration(seconds.lstrip("-")))


PROCESSES: dict[str, Callable[..., None]] = {
    "kill": _signal(signal.SIGKILL),
    "stop": _signal(signal.SIGTERM),
    "pause": _signal(signal.SIGSTOP),
    "resume": _signal(signal.SIGCONT),
    "wedge": _signal(signal.SIGUSR1),  # of `labs.faults.altered wedging`
    "start": _start,
    "fill_disk": _fill_disk,
    "free_disk": _free_disk,
    "starve": _starve,
    "feed": _feed,
}
CONNECTIONS: dict[str, Callable[..., None]] = {
    "delay": _delay,
    "slow": _slow,
    "hold": _each("hold"),
    "cut": _each("cut"),
    "refuse": _each("refuse"),
    "clear": _each("clear"),
}
OTHERS: dict[str, Callable[..., None]] = {"edit": _edit, "spoil": _spoil, "jump": _jump}


class Act:
    """One fault as it is written; `link` is the one that it is about, if any. Raises `ValueError`."""

    def __init__(self, text: str) -> None:
        verb, *self._arguments = text.split(maxsplit=2)
        known = PROCESSES | CONNECTIONS | OTHERS
        if verb not in known:
            raise ValueError(f"{text!r}: there is no {verb}; there are {', '.join(known)}")
        wanted = 2 if known[verb] in (_starve, _delay, _slow, _edit, _jump) else 1
        if len(self._arguments) != wanted:
            raise ValueError(f"{text!r}: {verb} has {wanted} more words")
        self.link = self._arguments[0] if verb in CONNECTIONS else ""
        if self.link and self.link not in LINKS:
            raise ValueError(f"{text!r}: there is no connection {self.link}; there are {', '.join(LINKS)}")
        self.needs_clock = verb == "jump"
        self._act = known[verb]

    def on(self, site: Site) -> Callable[[], None]:
        return partial(self._act, site, *self._arguments)
