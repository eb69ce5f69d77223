"""Shows how the source is laid out, and how much a request crosses of it: python -m scripts.structure

It reads the five packages and their tests, of which it knows no module by name, and runs `sluice serve` to count calls
(scripts/request_path.py says how). `--list` shows what is behind every count, `--json FILE` keeps the figures, and
`--compare FILE` shows figures that were kept before beside those of now.
"""

import argparse
import ast
import inspect
import json
import re
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from platform import python_version

from scripts.request_path import Trip, with_defaults, with_limits

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("fleet", "gateway", "admission", "quotas", "backend")
MANY_LINES, FEW_LINES, MANY_MODULES = 400, 50, 25


@dataclass(frozen=True)
class Figure:
    """One row of the table."""

    name: str
    value: float
    places: Collection[str] = ()  # the counted items, with their places


# The layout -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Module:
    """A Python file that is not empty."""

    path: Path  # relative to the root
    source: str

    @property
    def name(self) -> str:
        """The name it is imported by."""
        return ".".join(self.path.parent.parts if self.is_package else self.path.with_suffix("").parts)

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def num_lines(self) -> int:
        return len(self.source.splitlines())

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    def place(self, node: ast.expr | ast.stmt) -> str:
        return f"{self.path}:{node.lineno}"


def layout(root: Path) -> list[Figure]:
    """The figures of the packages and tests that lie in `root`."""
    modules = [module for package in PACKAGES for module in _modules(root, package)]
    if not modules:
        raise SystemExit(f"none of {', '.join(PACKAGES)} is in {root}")
    return [*_sizes(modules), *_functions(modules), *_names(modules), *_docstrings(modules), *_tests(root, modules)]


def _modules(root: Path, folder: str) -> list[Module]:
    files = [(path.relative_to(root), path.read_text()) for path in sorted((root / folder).rglob("*.py"))]
    return [Module(path, source) for path, source in files if source.strip()]


def _sizes(modules: list[Module]) -> Iterator[Figure]:
    def having(condition: Callable[[int], bool]) -> list[str]:
        return [f"{module.path}: {module.num_lines}" for module in modules if condition(module.num_lines)]

    small, large = having(lambda lines: lines < FEW_LINES), having(lambda lines: lines > MANY_LINES)
    importers = _importers(modules)
    lonely = [f"{name}: {', '.join(found)}" for name, found in importers.items() if len(found) == 1]
    folders = Counter(str(module.path.parent) for module in modules)
    broad = [f"{folder}: {count}" for folder, count in folders.most_common() if count > MANY_MODULES]
    yield Figure("modules", len(modules))
    yield Figure("lines", sum(module.num_lines for module in modules))
    yield Figure("lines of a module, median", statistics.median(module.num_lines for module in modules))
    yield Figure(f"modules of less than {FEW_LINES} lines", len(small), small)
    yield Figure(f"modules of more than {MANY_LINES} lines", len(large), large)
    yield Figure("modules that one other imports", len(lonely), lonely)
    yield Figure("folders", len(folders), [f"{folder}: {count}" for folder, count in folders.most_common()])
    yield Figure("modules in the broadest folder", max(folders.values()))
    yield Figure(f"folders of more than {MANY_MODULES} modules", len(broad), broad)


def _importers(modules: list[Module]) -> dict[str, set[str]]:
    """The modules that import each one, also where only an annotation needs it. `from a import b` may name a module."""
    importers: dict[str, set[str]] = {module.name: set() for module in modules}
    for module in modules:
        imported: set[str] = set()
        for node in module.nodes:
            if isinstance(node, ast.Import):
                imported.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                members = {f"{node.module}.{alias.name}" for alias in node.names}
                imported.update(members & importers.keys() or {node.module or ""})
        for name in (imported & importers.keys()) - {module.name}:
            importers[name].add(module.name)
    return importers


def _functions(modules: list[Module]) -> Iterator[Figure]:
    """The lengths of functions, from `def` to the last line, docstring and nested functions included."""
    lengths = sorted(
        (1 + (node.end_lineno or node.lineno) - node.lineno, f"{module.place(node)} {node.name}")
        for module in modules
        for node in module.nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    yield Figure("functions", len(lengths))
    if lengths:
        yield Figure("lines of a function, median", statistics.median(lines for lines, _ in lengths))
        yield Figure("lines of a function, 90th percentile", lengths[len(lengths) * 9 // 10][0])
        yield Figure("lines of a function, most", lengths[-1][0], [f"{place}: {n}" for n, place in lengths[:-11:-1]])


def _names(modules: list[Module]) -> Iterator[Figure]:
    classes = _defined(modules, lambda node: isinstance(node, ast.ClassDef))
    functions = _defined(
        modules,
        lambda node: isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"),
    )
    foreign = _imported_from_elsewhere(modules)
    renamed, others = _renamed(modules, classes)
    clashes = [
        f"{name}: {', '.join(places)}; from {', '.join(sorted(foreign[name]))}"
        for name, places in sorted(classes.items())
        if name in foreign
    ]
    for kind, defined in (("class names", classes), ("public function names", functions)):
        twice = [f"{name}: {', '.join(places)}" for name, places in sorted(defined.items()) if len(places) > 1]
        yield Figure(f"{kind} defined more than once", len(twice), twice)
    yield Figure("class names that a library's import has too", len(clashes), clashes)
    yield Figure("imports that rename what is named like a class of ours", len(renamed), renamed)
    yield Figure("imports that rename a module or function of ours", len(others), others)


def _defined(modules: list[Module], is_meant: Callable[[ast.stmt], bool]) -> dict[str, list[str]]:
    """Where each name is defined at the top of a module."""
    defined: dict[str, dict[Path, str]] = defaultdict(dict)
    for module in modules:
        for node in module.tree.body:
            if is_meant(node):
                defined[getattr(node, "name", "")].setdefault(module.path, module.place(node))
    return {name: list(places.values()) for name, places in defined.items()}


def _from_imports(modules: list[Module]) -> Iterator[tuple[Module, ast.ImportFrom, ast.alias]]:
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.ImportFrom):
                yield from ((module, node, alias) for alias in node.names)


def _is_ours(node: ast.ImportFrom) -> bool:
    return node.level > 0 or (node.module or "").partition(".")[0] in PACKAGES


def _imported_from_elsewhere(modules: list[Module]) -> dict[str, set[str]]:
    """The libraries' modules that each name is imported from."""
    foreign: dict[str, set[str]] = defaultdict(set)
    for _, node, alias in _from_imports(modules):
        if not _is_ours(node):
            foreign[alias.name].add(node.module or "")
    return foreign


def _renamed(modules: list[Module], classes: Mapping[str, object]) -> tuple[list[str], list[str]]:
    """Imports under another name: of what has the name of a class of ours, wherever it comes from; of ours besides."""
    renamed: tuple[list[str], list[str]] = ([], [])
    for module, node, alias in _from_imports(modules):
        if alias.asname not in {None, alias.name} and (alias.name in classes or _is_ours(node)):
            renamed[alias.name not in classes].append(f"{module.place(node)}: {alias.name} as {alias.asname}")
    return renamed


CLAUSE = frozenset({"what", "who", "whose", "which", "whether", "that", "how", "why", "or", "and", "nor", "of", "than"})
CLAUSE_UNLESS_COMMA = frozenset({"where", "when", "whatever", "whoever", "as", "if", "while", "until", "unless"})
RIDDLE = re.compile(  # a pronoun in place of a noun
    r"\b(so (many|much|few)(?! as)|whoever|whatever|anybody|somebody|nobody|those (that|who|which)|such(?! as)"
    r"|ones? that|what is not|who (has|have|is|are))\b",
    re.IGNORECASE,
)


def fault_of(docstring: str) -> str | None:
    """The reason why a docstring's first paragraph is no sentence, by a rule that needs no grammar; None: it passes.

    It has fewer than four words; or it does not end with a full stop, a colon or the like; or it opens with a word that
    makes it a clause on its own ("What is asked for."): a whole sentence that opens so can begin with its subject. For
    words that open many a sentence ("Where it is full, it waits.") a comma decides. A subject without a noun ("Those
    that wait.") or a riddle ("so many") is a fault as well. Noun phrases of four words pass.
    """
    paragraph = " ".join(inspect.cleandoc(docstring).partition("\n\n")[0].split())
    words = [word for word in paragraph.split() if re.search(r"\w", word)]
    if len(words) < 4:
        return "fewer than four words"
    if paragraph.rstrip("\"'`)")[-1:] not in tuple(".:?!"):
        return "no full stop"
    first = words[0].lower().rstrip(",")
    if first in CLAUSE or (first in CLAUSE_UNLESS_COMMA and "," not in paragraph):
        return "a clause on its own"
    if riddle := RIDDLE.search(paragraph):
        return f"a riddle, {riddle[0]!r}"
    return None


def _docstrings(modules: list[Module]) -> Iterator[Figure]:
    """The docstrings of modules, classes, functions and, below an assignment, of the assigned name."""
    found = [
        (module.place(node), node.value.value)
        for module in modules
        for node in module.nodes
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    faults = [(place, fault, text) for place, text in found if (fault := fault_of(text))]
    listed = [f"{place}: {fault}: {' '.join(text.split()):.100}" for place, fault, text in faults]
    yield Figure("docstrings", len(found))
    yield Figure("docstrings that are no sentence", len(faults), listed)


def _tests(root: Path, modules: list[Module]) -> Iterator[Figure]:
    """`tests/a/test_b.py` mirrors `a/b.py`, or the package `a/b`."""
    tests = [module.path for package in PACKAGES for module in _modules(root, f"tests/{package}")]
    tests = [path for path in tests if path.name.startswith("test_")]
    mirrored = {path.relative_to("tests").with_name(path.name.removeprefix("test_")).with_suffix("") for path in tests}
    places = {module.path.with_suffix("") for module in modules if not module.is_package}
    packages = {parent for place in places for parent in place.parents}
    strangers = [str(path) for path in sorted(mirrored - places - packages)]
    untested = [str(path) for path in sorted(places - mirrored)]
    yield Figure("test modules that mirror no module", len(strangers), strangers)
    yield Figure("modules without a test module of their name", len(untested), untested)
    yield Figure("lines of tests", sum(module.num_lines for module in _modules(root, "tests")))


# The way of a request -------------------------------------------------------------------------------------------------


def travel(requests: int) -> Iterator[Figure]:
    """Serve requests, and count the calls of one up to the first step handed to the device, and of a step."""
    for settings, serve in (("", with_defaults), (", limits and event log", with_limits)):
        paths = serve(ROOT, PACKAGES, requests)
        yield from _of_trip(f"endpoint to device{settings}", paths.request)
        yield from _of_trip(f"decode step{settings}", paths.step)
        yield from _of_trip(f"streamed decode step{settings}", paths.streamed_step)


def _of_trip(name: str, trip: Trip) -> Iterator[Figure]:
    for kind, counts in (("calls", trip.calls), ("frames", trip.frames)):
        yield Figure(f"{name}: {kind}", counts.total(), [f"{file}: {count}" for file, count in counts.most_common()])
        yield Figure(f"{name}: files of its {kind}", len(counts))


# The report -----------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="figures that were written before, to show beside")
    parser.add_argument("--list", action="store_true", help="show what was counted, and where it is")
    parser.add_argument("--requests", type=int, default=11, help="that the server is sent; 0: count no calls")
    options = parser.parse_args(arguments)
    before = json.loads(options.compare.read_text())["figures"] if options.compare else None
    figures = [*layout(ROOT), *(travel(options.requests) if options.requests else [])]
    if options.list:
        _print_places(figures)
    _print_table(figures, before)
    if options.json:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
        measured = {"python": python_version(), "commit": commit.stdout.strip() or None}
        kept = {**measured, "figures": {figure.name: figure.value for figure in figures}}
        options.json.write_text(json.dumps(kept, indent=2) + "\n")
    return 0


def _print_places(figures: Iterable[Figure]) -> None:
    for figure in figures:
        if figure.places:
            print(f"{figure.name}: {figure.value:g}", *(f"    {place}" for place in figure.places), sep="\n")


def _print_table(figures: Iterable[Figure], before: Mapping[str, float] | None) -> None:
    if before is not None:
        print(f"{'':60}{'before':>8}{'now':>8}")
    for figure in figures:
        kept = "" if before is None else f"{before[figure.name]:g}" if figure.name in before else "-"
        print(f"{figure.name:60}{kept:>8}{figure.value:>8g}")


if __name__ == "__main__":
    sys.exit(main())
