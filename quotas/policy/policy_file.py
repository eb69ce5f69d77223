"""Policy files: one file, or all *.yaml and *.yml of a folder, read as one policy.

All problems of all files are reported at once, each as `file:line:column: field: problem`.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from quotas.policy.parser import KnownTenants, PolicyFile, parse_files
from quotas.policy.policy import Policy
from quotas.policy.problems import MAX_PROBLEMS, Mark, Problem, Problems, TooManyProblems
from quotas.policy.tenant_texts import Indivisible, cut
from quotas.policy.yaml_nodes import MAX_BYTES, Composer, Fields, Node, Unreadable, compose

MAX_FILES = 256
MAX_TOTAL_BYTES = 4 * MAX_BYTES
SUFFIXES = (".yaml", ".yml")


class PolicyError(Exception):
    """The files are no valid policy; `problems` are all problems by file and line, or the first 100."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(problems))
        more = ["and perhaps more"] if len(self.problems) >= MAX_PROBLEMS else []
        super().__init__("\n".join([*map(str, self.problems), *more]))


def read_policy(path: Path) -> Policy:
    """Return the policy that the file or the folder at `path` holds. Raises `PolicyError`."""
    return parse_policy(read_sources(path))


def policy_files(path: Path) -> list[Path]:
    """The file itself, or the folder's files that are not hidden, without subfolders. Raises `PolicyError`."""
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
    except OSError as error:
        raise PolicyError([_unreadable(path, error)]) from None
    if path.is_dir():
        files = [file for file in files if file.suffix in SUFFIXES and not file.name.startswith(".")]
    if not files:
        raise PolicyError([Problem(Mark(str(path)), "", "is a folder without *.yaml files")])
    if len(files) > MAX_FILES:
        raise PolicyError([Problem(Mark(str(path)), "", f"has more than {MAX_FILES} policy files")])
    return files


def read_sources(path: Path) -> dict[str, bytes]:
    """The content of the files by name. Raises `PolicyError`, which names all unreadable files."""
    problems: list[Problem] = []
    sources: dict[str, bytes] = {}
    for file in policy_files(path):
        try:
            if file.exists() and not file.is_file():
                problems.append(Problem(Mark(str(file)), "", "is not a file"))
                continue
            with file.open("rb") as opened:
                sources[str(file)] = opened.read(MAX_BYTES + 1)
        except OSError as error:
            problems.append(_unreadable(file, error))
    if problems:
        raise PolicyError(problems)
    return sources


def field_places(sources: Mapping[str, bytes]) -> dict[str, Mark]:
    """The place of each field in these files, by its path such as tenants.acme.limits.tokens."""
    found: dict[str, Mark] = {}
    for name, content in sources.items():
        _note_places(compose(name, content, Problems()), "", found)
    return found


def _note_places(node: Node | None, path: str, found: dict[str, Mark]) -> None:
    """Add the places below `node`. It recurses, since files are at most a dozen levels deep."""
    for name, (mark, inner) in node.entries.items() if isinstance(node, Fields) else ():
        below = f"{path}.{name}" if path else name
        found.setdefault(below, mark)
        _note_places(inner, below, found)


def parse_policy(sources: Mapping[str, bytes]) -> Policy:
    """Return the policy that these files are together. Raises `PolicyError`."""
    return PolicyReader().parse(sources)


class PolicyReader:
    """Parses the files of a policy repeatedly, rereading only tenants whose text or defaults changed.

    Unchanged tenants are the same objects as before.
    """

    def __init__(self) -> None:
        self.known = KnownTenants()
        self._read: tuple[Mapping[str, bytes], Policy] | None = None  # the last valid one

    def parse(self, sources: Mapping[str, bytes]) -> Policy:
        """Return the policy that these files are together. Raises `PolicyError`."""
        if sum(map(len, sources.values())) > MAX_TOTAL_BYTES:
            (name, *_), most = sources, MAX_TOTAL_BYTES >> 20
            raise PolicyError([Problem(Mark(name), "", f"and its neighbours exceed {most} MiB together")])
        if self._read and self._read[0] == sources:
            return self._read[1]
        self._read = None
        try:
            policy = self._parse(sources, self._divided)
        except Indivisible:
            policy = self._parse(sources, _whole)
        self._read = dict(sources), policy
        return policy

    def _parse(self, sources: Mapping[str, bytes], read: Callable[[str, bytes, Problems], PolicyFile | None]) -> Policy:
        problems = Problems()
        policy = None
        with suppress(TooManyProblems):
            files = [read(name, content, problems) for name, content in sources.items()]
            found = [file for file in files if file is not None]
            policy = parse_files(found, problems, len(found) == len(files), self.known)
        if policy is None or problems.found:
            raise PolicyError(problems.found)
        return policy

    def _divided(self, name: str, content: bytes, problems: Problems) -> PolicyFile | None:
        """A file with its tenants as texts, if it can be cut."""
        digest, before = sha256(content).digest(), self.known.files.get(name)
        if before and before.file.digest == digest:
            return before.file
        parts = cut(name, content)
        if parts is not None:
            rest, texts = parts
            own = Problems()
            file = _whole(name, rest, own)
            if file is not None and not own.found and texts.are_tenants_of(file.tree):
                return file._replace(digest=digest, tenants=texts)
        return _whole(name, content, problems)


def _whole(name: str, content: bytes, problems: Problems) -> PolicyFile | None:
    composer = Composer(name, problems)
    try:
        tree = composer.run(content)
    except Unreadable as error:
        problems.add(error.problem.mark, "", error.problem.message)
        return None
    if isinstance(tree, Fields):
        return PolicyFile(name, b"", tree, composer.num_nodes)
    if tree is None:
        problems.add(Mark(name), "", "is empty: write at least `tenants:`")
    else:
        problems.add(tree.mark, "", "should hold fields: classes, defaults, tenants")
    return None


def _unreadable(path: Path, error: OSError) -> Problem:
    return Problem(Mark(str(path)), "", f"cannot be read: {error.strerror}")
