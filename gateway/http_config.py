"""How every port of the gateway speaks HTTP."""

import ssl

import uvicorn

from gateway.listening import ListenError
from gateway.settings import Settings


def http_config(settings: Settings) -> uvicorn.Config:
    """With TLS where it is configured. The application is set later, and each server makes its own connections."""
    return uvicorn.Config(
        app=_nothing,
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
