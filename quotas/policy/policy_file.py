"""Policy files: one file, or all *.yaml and *.yml of a folder, read as one policy.

Whatever is wrong with any of them is reported at once, each thing as `file:line:column: field: what`.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from quotas.policy.parser import parse
from quotas.policy.policy import Policy
from quotas.policy.problems import MAX_PROBLEMS, Mark, Problem, Problems, TooManyProblems
from quotas.policy.yaml_nodes import MAX_BYTES, Fields, Node, Unreadable, compose

MAX_FILES = 256
MAX_TOTAL_BYTES = 4 * MAX_BYTES
SUFFIXES = (".yaml", ".yml")


class PolicyError(Exception):
    """No policy can be made of the files; `problems` says why, by file and line: all problems, or the first 100."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(problems))
        more = ["and perhaps more"] if len(self.problems) >= MAX_PROBLEMS else []
        super().__init__("\n".join([*map(str, self.problems), *more]))


def read_policy(path: Path) -> Policy:
    """Return the policy that the file or the folder at `path` holds. Raises `PolicyError`."""
    return parse_policy(read_sources(path))


def policy_files(path: Path) -> list[Path]:
    """Return the files that `path` stands for: the file itself, or the files of that folder that are not hidden,
    without those of folders below it.

    Raises `PolicyError`.
    """
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
    """Return the content of the files by their names. Raises `PolicyError`, which names all that cannot be read."""
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
    """Return where each field stands that these files name, by its path such as tenants.acme.limits.tokens."""
    found: dict[str, Mark] = {}
    for name, content in sources.items():
        _note_places(_tree(name, content, Problems()), "", found)
    return found


def _note_places(node: Node | None, path: str, found: dict[str, Mark]) -> None:
    """Add the places below `node`. It recurses, since files are at most a dozen levels deep."""
    for name, (mark, inner) in node.entries.items() if isinstance(node, Fields) else ():
        below = f"{path}.{name}" if path else name
        found.setdefault(below, mark)
        _note_places(inner, below, found)


def parse_policy(sources: Mapping[str, bytes]) -> Policy:
    """Return the policy that these files are together. Raises `PolicyError`."""
    if sum(map(len, sources.values())) > MAX_TOTAL_BYTES:
        name = next(iter(sources))
        raise PolicyError([Problem(Mark(name), "", f"and its neighbours exceed {MAX_TOTAL_BYTES >> 20} MiB together")])
    problems = Problems()
    try:
        policy = _parse(sources, problems)
    except TooManyProblems:
        policy = None
    if policy is None or problems.found:
        raise PolicyError(problems.found)
    return policy


def _parse(sources: Mapping[str, bytes], problems: Problems) -> Policy:
    trees = {name: tree for name, content in sources.items() if (tree := _tree(name, content, problems))}
    return parse(trees, problems, is_whole=len(trees) == len(sources))


def _tree(name: str, content: bytes, problems: Problems) -> Node | None:
    try:
        tree = compose(name, content, problems)
    except Unreadable as error:
        problems.add(error.problem.mark, "", error.problem.message)
        return None
    if tree is None:
        problems.add(Mark(name), "", "holds nothing: write at least `tenants:`")
    elif not isinstance(tree, Fields):
        problems.add(tree.mark, "", "should hold fields: classes, defaults, tenants")
        return None
    return tree


def _unreadable(path: Path, error: OSError) -> Problem:
    return Problem(Mark(str(path)), "", f"cannot be read: {error.strerror}")
