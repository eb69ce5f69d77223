"""The image's health check asks where the gateway listens, under all settings of that."""

import re
import subprocess
import sys

import pytest

from gateway.settings.settings import Settings
from tests.deploy.documented import DEPLOY
from tests.gateway.server_process import ServerProcess

PROGRAM = DEPLOY / "livez.py"


def livez(**variables: str) -> int:
    command = [sys.executable, str(PROGRAM)]
    return subprocess.run(command, env=variables, capture_output=True, timeout=240, check=False).returncode


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_it_asks_the_admin_port(server: ServerProcess, host: str) -> None:
    assert livez(SLUICE_ADMIN_PORT=str(server.admin_port), SLUICE_ADMIN_HOST=host, SLUICE_PORT="1") == 0


def test_it_asks_the_tenants_port_where_there_is_no_other(server: ServerProcess) -> None:
    assert livez(SLUICE_ADMIN_PORT="off", SLUICE_PORT=str(server.port)) == 0


def test_a_gateway_that_does_not_answer_is_not_alive() -> None:
    assert livez(SLUICE_ADMIN_PORT="1") != 0


def test_it_speaks_tls_where_the_gateway_does(server: ServerProcess) -> None:
    assert livez(SLUICE_ADMIN_PORT=str(server.admin_port), SLUICE_TLS_CERT_FILE="/tls/cert.pem") != 0


def test_its_defaults_are_the_settings() -> None:
    defaults = dict(re.findall(r'environ\.get\("SLUICE_(\w+)", "([^"]+)"\)', PROGRAM.read_text()))
    assert defaults.keys() == {"ADMIN_HOST", "ADMIN_PORT", "HOST", "PORT"}
    assert defaults == {name: str(Settings.model_fields[name.lower()].default) for name in defaults}
