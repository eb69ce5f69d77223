"""Stands in for `sluice serve`: says where it is, that it is alive, and a state. It ends when it is told to."""

import sys
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import orjson

from tests.fleet.states import IDLE


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        knows_key = str(self.headers["authorization"]).startswith("Bearer ")
        self.send_response(200 if knows_key or self.path == "/livez" else 401)
        self.end_headers()
        self.wfile.write(orjson.dumps(replace(IDLE, replicas_wanted=1.5)))

    def log_message(self, *arguments: object) -> None:
        pass


if "--model=none" in sys.argv:
    sys.exit(1)
server = HTTPServer(("127.0.0.1", 0), Handler)
url = f"http://127.0.0.1:{server.server_port}"
sys.stdout.write(f"Sluice 0 is ready at {url}\n\n  admin     {url}, its key in nowhere\n")
sys.stdout.flush()
server.serve_forever()
