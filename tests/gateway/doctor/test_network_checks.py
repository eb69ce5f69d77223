from typing import Any
from unittest.mock import Mock

import pytest

from gateway.doctor import network_checks
from gateway.doctor.check import Verdict
from gateway.http.connection import bound_socket
from gateway.settings.settings import Settings

OK, WARNING, PROBLEM = Verdict.OK, Verdict.WARNING, Verdict.PROBLEM


def test_ports_free_and_taken() -> None:
    with bound_socket("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        tenants, admin = network_checks.ports(Settings(port=port, admin_port=0))
        assert (tenants.verdict, admin.verdict) == (PROBLEM, OK)
        assert "--port" in tenants.found
        _, admin = network_checks.ports(Settings(port=0, admin_port=port))
        assert "--admin-port" in admin.found
    assert network_checks.ports(Settings(port=0, admin_port="off"))[1].verdict is OK


def test_collectors() -> None:
    assert network_checks.collector(Settings()).verdict is OK
    with bound_socket("127.0.0.1", 0) as listening:
        listening.setblocking(True)
        listening.listen()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        assert network_checks.collector(Settings(otlp_endpoint=url)).verdict is OK
    assert network_checks.collector(Settings(otlp_endpoint=url)).verdict is WARNING


@pytest.mark.parametrize(
    ("url", "protocol", "port"), [("http", "grpc", 443), ("http", "http", 80), ("https", "http", 443)]
)
def test_a_collector_without_a_port_is_looked_for_where_spans_are_sent(
    url: str, protocol: Any, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.create_connection", refuse := Mock(side_effect=ConnectionRefusedError))
    check = network_checks.collector(Settings(otlp_endpoint=f"{url}://collector", otlp_protocol=protocol))
    refuse.assert_called_once_with(("collector", port), network_checks.CONNECT_SECONDS)
    assert f"collector:{port}" in check.found
