import asyncio
import socket
import ssl

from fleet.upstream import make_client
from gateway.http.connection import DEAD_PEER_SECONDS


async def test_the_kernel_is_to_notice_that_the_host_of_a_silent_stream_has_vanished() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
        await reader.read()
        writer.close()
        await writer.wait_closed()
        left.set()

    left = asyncio.Event()
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}/"
    async with server:
        async with make_client(ssl.create_default_context()) as client, client.stream("GET", url) as response:
            connection: socket.socket = response.extensions["network_stream"].get_extra_info("socket")
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < DEAD_PEER_SECONDS
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * DEAD_PEER_SECONDS
        await left.wait()
