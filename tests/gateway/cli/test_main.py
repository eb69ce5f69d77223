import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from backend.errors import ConfigError, ModelLoadError
from gateway.cli.main import ADDED_BY, main
from gateway.http.server import ListenError
from gateway.settings.settings import Settings
from gateway.telemetry.event_log_file import EventLogError
from gateway.tenants.key_store import KeyStoreError
from tests.gateway.cli.conftest import Printed, Sluice

Run = Callable[[Callable[[Settings], int]], None]


@pytest.fixture(autouse=True)
def _state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLUICE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("SLUICE_PEPPER", raising=False)


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Run:
    def replace(serve: Callable[[Settings], int]) -> None:
        module = ModuleType("gateway.app")
        vars(module)["run_gateway"] = lambda settings, announce: serve(settings)
        monkeypatch.setitem(sys.modules, "gateway.app", module)

    return replace


def test_serve_runs_the_gateway_with_the_flags(app: Run) -> None:
    seen: list[int] = []

    def serve(settings: Settings) -> int:
        seen.append(settings.port)
        return 3

    app(serve)
    assert main(["serve", "--port", "8123"]) == 3
    assert seen == [8123]


def test_a_bad_setting_is_one_message_and_status_2(app: Run, sluice: Sluice) -> None:
    app(lambda settings: 0)
    done = sluice("serve", "--port", "banana")
    assert (done.status, "--port (SLUICE_PORT)" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ConfigError("needs 128 blocks"), 2, "needs 128 blocks"),
        (ModelLoadError("config.json is missing"), 1, "config.json is missing"),
        (KeyStoreError("pepper is unreadable"), 1, "pepper is unreadable"),
        (ListenError("127.0.0.1:8000 is in use"), 1, "127.0.0.1:8000 is in use"),
        (EventLogError("the event log x cannot be written"), 1, "the event log x cannot be written"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_error_at_the_start_is_told_without_a_traceback(
    app: Run, sluice: Sluice, error: BaseException, status: int, said: str
) -> None:
    def serve(settings: Settings) -> int:
        raise error

    app(serve)
    done = sluice("serve")
    assert done.status == status
    assert said in done.err
    assert "Traceback" not in done.err


def test_an_error_of_ours_keeps_its_traceback(app: Run) -> None:
    def serve(settings: Settings) -> int:
        raise OSError(errno.EIO, "a disk failed")

    app(serve)
    with pytest.raises(OSError, match="a disk failed"):
        main(["serve"])


def test_a_misspelled_variable_is_warned_of(
    app: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    app(lambda settings: 0)
    monkeypatch.setenv("SLUICE_PROT", "1")
    assert main(["serve"]) == 0
    assert "SLUICE_PROT is not a setting and is ignored (did you mean SLUICE_PORT?)" in capfd.readouterr().err


def test_a_misspelled_flag_is_refused_with_the_nearest(sluice: Sluice) -> None:
    done = sluice("serve", "--max-num-seq", "3")
    assert (done.status, "--max-num-seq (did you mean --max-num-seqs?)" in done.err) == (2, True)


def test_the_version_is_told_in_two_ways(printed: Printed, sluice: Sluice) -> None:
    said = printed("version")
    assert sluice("--version").out == said
    assert said.startswith("sluice ")


@pytest.mark.parametrize("command", [[], ["keys"], ["policy"]])
def test_a_command_that_lacks_one_prints_its_help(command: list[str], printed: Printed) -> None:
    assert printed(*command).startswith(f"usage: {' '.join(['sluice', *command])} ")


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys, gateway.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_command_waits_for_the_modules_of_another() -> None:
    code = "import sys, gateway.cli.main as cli; cli.main(['version']); sys.exit('labs.cli.tune' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize("command", ADDED_BY)
def test_a_command_of_the_help_is_understood_alone(command: str, sluice: Sluice) -> None:
    said = sluice(command, "--help")
    assert (said.status, said.out.partition("\n")[0].startswith(f"usage: sluice {command}")) == (0, True)
    assert f"    {command} " in sluice("--help").out


def test_a_closed_pipe_ends_a_command_without_a_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with monkeypatch.context() as patched, os.fdopen(writer, "w") as closed:
        patched.setattr(sys, "stdout", closed)
        assert main(["version"]) == 141
