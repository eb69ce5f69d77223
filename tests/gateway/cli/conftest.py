from collections.abc import Callable
from typing import NamedTuple

import pytest

from gateway.cli.main import main


class Done(NamedTuple):
    status: int
    out: str
    err: str


Sluice = Callable[..., Done]
Printed = Callable[..., str]


@pytest.fixture
def sluice(capsys: pytest.CaptureFixture[str]) -> Sluice:
    def run(*arguments: object) -> Done:
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 1
        return Done(status, *capsys.readouterr())

    return run


@pytest.fixture
def printed(sluice: Sluice) -> Printed:
    """Runs the command, which must succeed, and returns what it prints."""

    def run(*arguments: object) -> str:
        done = sluice(*arguments)
        assert done.status == 0, done.err
        return done.out

    return run
