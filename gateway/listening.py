"""Ports to listen on, and what to do about one that cannot be had."""

import errno
import socket

from gateway.connection import bound_socket

PRIVILEGED_PORTS = 1024


class ListenError(Exception):
    """A port cannot be served; the message names the flag to change."""


def open_port(host: str, port: int, prefix: str = "--") -> socket.socket:
    """A bound socket, of flags such as --host and --port. Raises `ListenError`."""
    try:
        return bound_socket(host, port)
    except OSError as error:
        raise ListenError(why_not_listening(error, host, port, prefix)) from None


def why_not_listening(error: OSError, host: str, port: int, prefix: str = "--") -> str:
    """For flags such as --host and --port; an error that has to do with neither is raised again."""
    address, other_port = f"{host}:{port}", f"with {prefix}port"
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is not an address of this machine: choose another with {prefix}host"
    if error.errno == errno.EADDRINUSE:
        return f"{address} is in use: stop what listens there, or choose another port {other_port}"
    if error.errno == errno.EACCES and port < PRIVILEGED_PORTS:
        return f"{address} needs privileges that this user lacks: choose a port above 1023 {other_port}"
    raise error
