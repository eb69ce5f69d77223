"""The files of a router's admin page: its own, and the shared ones of a gateway's page."""

from collections.abc import Mapping
from pathlib import Path

from gateway.admin.endpoint import Blob
from gateway.admin.page_files import page_files

DIRECTORY = Path(__file__).parent / "page"
SHARED = (
    "colours.css",
    "style.css",
    "tables.css",
    "now.css",
    "windows.css",
    "icon.svg",
    "api.js",
    "board.js",
    "detail.js",
    "dom.js",
    "freshness.js",
    "plain_table.js",
    "poller.js",
    "sign_in.js",
    "summary.js",
    "table.js",
    "text.js",
    "units.js",
)


def fleet_page() -> Mapping[str, Blob]:
    """Read the files by the path they are served at."""
    gateways = page_files()
    return {**{f"/{name}": gateways[f"/{name}"] for name in SHARED}, **page_files(DIRECTORY)}
