"""How every port of the gateway speaks HTTP."""

import uvicorn

from gateway.connection import Connection
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


async def _nothing(scope: object, receive: object, send: object) -> None:
    """Stands in for the application until it is made."""
