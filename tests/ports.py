import socket


def free_port() -> int:
    """Return a port of this machine, for a program that has to be told one."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
