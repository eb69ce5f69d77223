"""How every port of the gateway speaks HTTP."""

import ssl

import uvicorn

from gateway.connection import Connection
from gateway.listening import ListenError
from gateway.settings import Settings


def http_config(settings: Settings, max_connections: int) -> uvicorn.Config:
    """With the limits on slow and on many clients, and TLS where it is configured. The application is set later."""
    limits = {"header_timeout": settings.header_timeout, "max_connections": max_connections}
    return uvicorn.Config(
        app=_nothing,
        http=type("LimitedConnection", (Connection,), limits),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=settings.idle_timeout,  # type: ignore[arg-type]  # seconds; a float works
        ssl_certfile=settings.tls_cert_file,
        ssl_keyfile=settings.tls_key_file,
    )


def check_tls(settings: Settings) -> None:
    """Raises `ListenError` for a certificate and a key with which no port could be served."""
    if settings.tls_cert_file is None or settings.tls_key_file is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert_file, settings.tls_key_file)
    except OSError as error:
        raise ListenError(
            f"TLS cannot be served with --tls-cert-file {settings.tls_cert_file} and --tls-key-file "
            f"{settings.tls_key_file}: {error}; they must be PEM, and belong together"
        ) from None


async def _nothing(scope: object, receive: object, send: object) -> None:
    """Stands in for the application until it is made."""
