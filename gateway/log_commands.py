"""`sluice explain` and `sluice replay`: what the core decided, read off its event log."""

from argparse import Namespace, _SubParsersAction
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from admission.event_log import ReplayMismatch, replay
from admission.explain import explain
from gateway.event_log_file import read_event_log


class LogError(Exception):
    """An event log that cannot be read, or that says nothing of what was asked."""


def add_to(commands: "_SubParsersAction[Any]") -> None:
    told = commands.add_parser("explain", help="why a request waited, was refused or was preempted")
    told.add_argument("request", metavar="REQUEST_ID", help="the id in the response, such as chatcmpl-...")
    again = commands.add_parser("replay", help="decide an event log again and compare, byte for byte")
    for command, run in ((told, _explain), (again, _replay)):
        command.add_argument("--log", metavar="FILE", type=Path, required=True, help="what --event-log was given")
        command.set_defaults(run=run, parser=command)


def _explain(namespace: Namespace) -> int:
    story = explain(_lines(namespace.log), namespace.request)
    if not story:
        raise LogError(f"{namespace.log} says nothing of {namespace.request}: is it the id of a response, in this log?")
    print("\n".join(story))
    return 0


def _replay(namespace: Namespace) -> int:
    count = 0
    try:
        for _ in replay(_lines(namespace.log)):
            count += 1
    except ReplayMismatch as error:
        raise LogError(f"{namespace.log}: not reproduced: {error}") from None
    print(f"{count} entries reproduced to the byte")
    return 0


def _lines(path: Path) -> Iterator[str]:
    try:
        yield from read_event_log(path)
    except OSError as error:
        raise LogError(f"{path} cannot be read: {error.strerror}") from None
