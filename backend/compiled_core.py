"""The compiled core: the same sources as machine code, which decides the same in less than half of the time.

`python -m backend.compile_core` compiles them (mypyc) into a directory of the environment whose name is a digest of the
sources. `use` has Python import them from there. After an edit or a checkout the digest differs, and the sources are
interpreted until they are compiled again: code that was compiled from other sources is never imported.
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (
    "backend",
    "backend/paged_kv",
    "backend/scheduler",
    "admission",
    "admission/event_logs",
    "admission/kv",
    "admission/step_times",
)
"""The folders of the compiled sources, and of the sources whose types are compiled in."""


def _modules(folder: str, *interpreted: str) -> tuple[str, ...]:
    left_out = {"__init__", *interpreted}
    names = sorted(path.stem for path in (ROOT / folder).glob("*.py"))
    return tuple(f"{folder.replace('/', '.')}.{name}" for name in names if name not in left_out)


MODULES = (
    "backend.step_loop",
    *_modules("backend/paged_kv", "block_names", "kv_cache"),
    *_modules("backend/scheduler", "batching", "waiting_queue"),
    *_modules("admission", "admission", "core", "explain", "observer", "outcome", "request", "scheduling_policy"),
    *_modules("admission/event_logs"),
    *_modules("admission/kv"),
    *_modules("admission/step_times"),
)  # fmt: skip
"""The compiled modules: every module of these folders but the named ones. A module is left out if other modules derive
classes from its own, refer to them weakly, or pickle them, which compiled classes do not allow; or if it tells a whole
number from another where a `float` may be either, because a compiled `float` is always a float.
"""

GROUP = "sluice_core"
LIBRARY = f"{GROUP}__mypyc"  # the code of all modules, as mypyc names it


def is_used() -> bool:
    """Return True if the core of this process is compiled."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def use() -> bool:
    """Have the core imported as compiled, if it was compiled from the present sources; returns True if so.

    No module of the core may have been imported before: otherwise all of it stays interpreted.
    """
    if is_used():
        return True
    directory = compiled()
    if directory is None or not sys.modules.keys().isdisjoint(MODULES):
        return False
    finder = _Finder(directory)
    sys.meta_path.insert(0, finder)
    try:
        import_module(LIBRARY)
    except ImportError as error:
        sys.meta_path.remove(finder)
        log.warning("cannot load the compiled core, it is interpreted instead: %s", error)
        return False
    return True


def compiled() -> Path | None:
    """Return the directory of the modules that were compiled from the present sources; None if there is none."""
    directory = home() / directory_name(sources())
    return directory if directory.is_dir() else None


def has_tools() -> bool:
    """Return True if this environment can compile the core, as only developers' can."""
    return find_spec("mypyc") is not None and find_spec("setuptools") is not None


def how_to_compile() -> str:
    """Return the command that compiles the core."""
    if has_tools():
        return "python -m backend.compile_core"
    if (ROOT / "scripts" / "compile").is_file():
        return "scripts/compile"
    return "pip install mypy setuptools, then python -m backend.compile_core"


def home() -> Path:
    """Return the directory of all modules that were compiled for this environment."""
    return Path(sys.prefix, "share", "sluice")


def sources() -> dict[str, bytes]:
    """Return the sources that the compiled modules depend on, by their paths below the root."""
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in paths}


def directory_name(contents: Mapping[str, bytes]) -> str:
    """Return the name of the directory for modules compiled from these sources, for this Python."""
    digest = sha256("\0".join((EXTENSION_SUFFIXES[0], *MODULES)).encode())
    for name, content in contents.items():
        digest.update(f"\0{name}\0{len(content)}\0".encode() + content)
    return f"core-{digest.hexdigest()[:16]}"


class _Finder(MetaPathFinder):
    """Finds the compiled modules in their directory, and no others."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MODULES and fullname != LIBRARY:
            return None
        return PathFinder.find_spec(fullname, [str(self._directory.joinpath(*fullname.split(".")[:-1]))])
