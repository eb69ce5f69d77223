"""What to do about an address that cannot be listened on."""

import errno
import socket

PRIVILEGED_PORTS = 1024


class ListenError(Exception):
    """The message names the address and the flag to change."""


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
