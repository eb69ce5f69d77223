"""The files of the admin page. Only these are ever served: a path is looked up here, never in the file system."""

from collections.abc import Mapping
from pathlib import Path

from gateway.admin.endpoint import Blob

DIRECTORY = Path(__file__).parent / "page"
INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


def page_files(directory: Path = DIRECTORY) -> Mapping[str, Blob]:
    """Read the files of the package, by the path they are served at; the index is at "/" as well."""
    files = {
        f"/{path.relative_to(directory).as_posix()}": Blob(path.read_bytes(), _TYPES[path.suffix])
        for path in sorted(directory.rglob("*"))
        if path.suffix in _TYPES and path.is_file()
    }
    index = files.get(f"/{INDEX}")
    return files if index is None else {"/": index, **files}
