"""The faults of a scenario, each a line such as `kill gateway`, `delay store 60ms` or `edit tenants.light.weight 2`."""

import json
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

from labs.faults.proxy import Proxy
from labs.faults.site import LINKS, TARGETS, Process, Site
from quotas.policy import units

NOT_A_POLICY = "tenants: [what is this"


def _processes(act: Callable[..., object]) -> Callable[..., None]:
    def on_each(site: Site, target: str, *value: Any) -> None:
        for process in site.named(target):
            act(process, *value)

    return on_each


def _proxies(act: Callable[..., object]) -> Callable[..., None]:
    def on_each(site: Site, link: str, *value: Any) -> None:
        for proxy in site.links[link]:
            act(proxy, *value)

    return on_each


def _slow(proxy: Proxy, bytes_per_second: int) -> None:
    proxy.rate = float(bytes_per_second)


def _edit(site: Site, field: str, value: object) -> None:
    *parents, last = field.split(".")
    place = site.policy
    for name in parents:
        place = place.setdefault(name, {})
    place[last] = value
    site.write_policy()


def _spoil(site: Site, _: str) -> None:
    site.write_policy(NOT_A_POLICY)


def _jump(site: Site, _: str, seconds: float) -> None:
    site.set_clock(seconds)


def _seconds(text: str) -> float:
    """A duration, forward or with a minus backward."""
    sign = -1 if text.startswith("-") else 1
    return sign * units.positive_duration(text.lstrip("-"))


def _field(text: str) -> Any:
    """JSON or a word."""
    try:
        return json.loads(text)
    except ValueError:
        return text


PROCESSES: dict[str, Callable[..., None]] = {
    "kill": _processes(partial(Process.signal, number=signal.SIGKILL)),
    "stop": _processes(partial(Process.signal, number=signal.SIGTERM)),
    "pause": _processes(partial(Process.signal, number=signal.SIGSTOP)),
    "resume": _processes(partial(Process.signal, number=signal.SIGCONT)),
    "wedge": _processes(partial(Process.signal, number=signal.SIGUSR1)),  # of `labs.faults.altered wedging`
    "start": _processes(Process.start),
    "fill_disk": _processes(partial(Process.limit_files, most=0)),
    "free_disk": _processes(partial(Process.limit_files, most=None)),
    "starve": _processes(Process.limit_memory),
    "feed": _processes(partial(Process.limit_memory, room=None)),
}
CONNECTIONS: dict[str, Callable[..., None]] = {
    "delay": _proxies(Proxy.delay),
    "slow": _proxies(_slow),
    "hold": _proxies(Proxy.hold),
    "cut": _proxies(Proxy.cut),
    "refuse": _proxies(Proxy.refuse),
    "clear": _proxies(Proxy.clear),
}
OTHERS: dict[str, Callable[..., None]] = {"edit": _edit, "spoil": _spoil, "jump": _jump}
VALUES: dict[str, Callable[[str], Any]] = {  # the readers of second words
    "starve": units.size,
    "delay": units.positive_duration,
    "slow": units.size,
    "edit": _field,
    "jump": _seconds,
}


class Act:
    """One fault as it is written; `link`: the connection that it changes, if any. Raises `ValueError`."""

    def __init__(self, text: str) -> None:
        verb, *words = text.split(maxsplit=2)
        known = PROCESSES | CONNECTIONS | OTHERS
        if verb not in known:
            raise ValueError(f"{text!r}: there is no {verb}; there are {', '.join(known)}")
        wanted = 2 if verb in VALUES else 1
        if len(words) != wanted:
            raise ValueError(f"{text!r}: {verb} has {wanted} more words")
        target, *values = words
        self.link = target if verb in CONNECTIONS else ""
        if self.link and self.link not in LINKS:
            raise ValueError(f"{text!r}: there is no connection {self.link}; there are {', '.join(LINKS)}")
        if verb in PROCESSES and target not in TARGETS:
            raise ValueError(f"{text!r}: there is no process {target}; there are {', '.join(TARGETS)}")
        try:
            self._arguments = [target, *map(VALUES[verb], values)] if values else [target]
        except ValueError as error:
            raise ValueError(f"{text!r}: {values[0]} {error}") from None
        self.needs_clock = verb == "jump"
        self._act = known[verb]

    def on(self, site: Site) -> Callable[[], None]:
        return partial(self._act, site, *self._arguments)
