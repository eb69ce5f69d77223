#!/opt/sluice/bin/python
"""The container's health check: exit status 0 while the gateway beside it is alive.

Asks the admin port, whose connections strangers cannot use up, or the tenants' where there is none. Where they listen
and whether they speak TLS it reads from the variables that the gateway reads: flags it cannot know.
"""

import os
import ssl
import sys
from http.client import HTTPConnection, HTTPSConnection

SECONDS = 4.0


def main() -> int:
    host, port = os.environ.get("SLUICE_ADMIN_HOST", "127.0.0.1"), os.environ.get("SLUICE_ADMIN_PORT", "8001")
    if port == "off":
        host, port = os.environ.get("SLUICE_HOST", "127.0.0.1"), os.environ.get("SLUICE_PORT", "8000")
    connection = _connection(host, int(port))
    connection.request("GET", "/livez")
    return int(connection.getresponse().status != 200)


def _connection(host: str, port: int) -> HTTPConnection:
    if not os.environ.get("SLUICE_TLS_CERT_FILE"):
        return HTTPConnection(host, port, timeout=SECONDS)
    context = ssl.create_default_context()
    context.check_hostname = False  # the certificate is for the name that clients know
    context.verify_mode = ssl.CERT_NONE
    return HTTPSConnection(host, port, timeout=SECONDS, context=context)


if __name__ == "__main__":
    sys.exit(main())
