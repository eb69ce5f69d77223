import errno
import socket
import sys
from pathlib import Path

import pytest

from gateway.http.connection import bound_socket
from gateway.http.connection_table import ConnectionTable
from gateway.http.server import HttpServer, ListenError, check_tls, open_port, why_not_listening
from gateway.settings.settings import Settings

MOST_WAITING = int(Path("/proc/sys/net/core/somaxconn").read_text())


def test_an_address_of_elsewhere_is_named_with_its_flag() -> None:
    said = "is not an address of this machine: choose another with --host"
    with pytest.raises(ListenError, match=f"203.0.113.1 {said}"):
        open_port("203.0.113.1", 0)
    with pytest.raises(ListenError, match=f"a..b {said}"):
        open_port("a..b", 0)
    assert said in why_not_listening(socket.gaierror(-2, "unknown"), "nowhere", 0)


def test_a_privileged_port_is_told_from_other_lacks_of_permission() -> None:
    denied = PermissionError(errno.EACCES, "Permission denied")
    assert "privileges" in why_not_listening(denied, "127.0.0.1", 80)
    with pytest.raises(PermissionError):
        why_not_listening(denied, "127.0.0.1", 8000)


async def test_as_many_connections_wait_for_their_acceptance_as_the_kernel_allows() -> None:
    """A connection beyond them is heard again after 1, 3 and 7 s."""
    with bound_socket("127.0.0.1", 0) as sock:
        server = HttpServer(Settings(), ConnectionTable(8, 8))
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        await server.startup([sock])
        try:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
        finally:
            await server.shutdown()
    may_wait = int.from_bytes(info[28:32], sys.byteorder)  # `tcpi_sacked`, of a socket that listens
    assert may_wait == MOST_WAITING


@pytest.mark.parametrize(("write_timeout", "milliseconds"), [(30.5, 30_500), (5.0, 20_000), (3600.0, 3_600_000)])
async def test_a_reader_that_stops_has_its_time_before_the_kernel_ends_its_connection(
    write_timeout: float, milliseconds: int
) -> None:
    with bound_socket("127.0.0.1", 0) as sock:
        server = HttpServer(Settings(write_timeout=write_timeout), ConnectionTable(8, 8))
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        await server.startup([sock])
        await server.shutdown()
        sock.setblocking(True)
        with socket.create_connection(sock.getsockname()), sock.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == milliseconds


async def test_of_two_processes_that_have_bound_a_port_the_second_to_listen_is_told() -> None:
    with bound_socket("127.0.0.1", 0) as first, bound_socket("127.0.0.1", first.getsockname()[1]) as second:
        first.listen()
        server = HttpServer(Settings(), 8)
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        with pytest.raises(ListenError, match=f"127.0.0.1:{first.getsockname()[1]} is in use"):
            await server.startup([second])


def test_a_certificate_that_is_none_is_told_before_anything_is_served(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    for path in (cert, key):
        path.write_text("no PEM")
    with pytest.raises(ListenError, match=f"--tls-cert-file {cert} and --tls-key-file {key}: .* belong together"):
        check_tls(Settings(tls_cert_file=cert, tls_key_file=key))
    check_tls(Settings())
