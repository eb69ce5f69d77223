"""Shows how the source is laid out, and how much a request crosses of it: `python -m scripts.structure`.

It reads the five packages, `labs`, `scripts` and the tests, and runs `sluice serve` to count calls
(scripts/request_path.py says how). `--list` shows what is behind every count, `--json FILE` keeps the figures, and
`--compare FILE` shows kept figures beside the present ones.
"""

import argparse
import ast
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
BESIDE = ("labs", "scripts")
CORE = ("admission/", "backend/scheduler/", "backend/paged_kv/", "backend/step_loop.py")
MANY_LINES, FEW_LINES = 600, 50
MOST_FIELDS = 30  # of a record
MOST_ATTRIBUTES = 12  # of a class with a constructor of its own
MANY_CLASSES = 8  # with a method of one name
RIDDLE_WORDS = re.compile(r"so many|whoever|whatever", re.IGNORECASE)
TEXTS = (*PACKAGES, *BESIDE, "sluice", "docs", "examples", "deploy", "tests")


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
    beside = {folder: _modules(root, folder) for folder in BESIDE}
    return [
        *_sizes(modules),
        *_functions(modules),
        *_classes(modules),
        *_tests(root, modules),
        *(Figure(f"lines of {folder}", sum(module.num_lines for module in found)) for folder, found in beside.items()),
        _packed([*modules, *(module for found in beside.values() for module in found)]),
        _riddles(root),
    ]


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
    yield Figure("modules", len(modules))
    yield Figure("lines", sum(module.num_lines for module in modules))
    yield Figure("lines of a module, median", statistics.median(module.num_lines for module in modules))
    yield Figure(f"modules of less than {FEW_LINES} lines", len(small), small)
    yield Figure(f"modules of more than {MANY_LINES} lines", len(large), large)
    yield Figure("modules that one other imports", len(lonely), lonely)
    yield Figure("folders", len(folders), [f"{folder}: {count}" for folder, count in folders.most_common()])


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


# Classes --------------------------------------------------------------------------------------------------------------


def _classes(modules: list[Module]) -> Iterator[Figure]:
    classes = [(module, node) for module in modules for node in module.nodes if isinstance(node, ast.ClassDef)]
    records, others = list[tuple[int, str]](), list[tuple[int, str]]()
    methods: dict[str, list[str]] = defaultdict(list)
    for module, node in classes:
        entry = len(_attributes(node)), f"{module.place(node)} {node.name}"
        (others if "__init__" in _method_names(node) else records).append(entry)
        for name in _method_names(node):
            if not name.startswith("_"):
                methods[name].append(f"{node.name} ({module.path})")
    repeated = {name: places for name, places in methods.items() if len(places) > MANY_CLASSES}
    shown = [f"{name}: {len(places)}: {', '.join(places)}" for name, places in sorted(repeated.items())]
    assigned, constants = _callables_set_from_outside(modules), _constants_of_core(modules)
    largest = sorted([*records, *others], reverse=True)
    yield Figure("fields of a class, most", largest[0][0] if largest else 0, _listed(largest[:10]))
    for kind, found, most in (("records", records, MOST_FIELDS), ("other classes", others, MOST_ATTRIBUTES)):
        over = _listed(sorted((one for one in found if one[0] > most), reverse=True))
        yield Figure(f"{kind} of more than {most} fields", len(over), over)
    yield Figure(f"public methods of one name on more than {MANY_CLASSES} classes", len(repeated), shown)
    yield Figure("module constants of the core", len(constants), constants)
    yield Figure("callables set from outside", len(assigned), assigned)


def _listed(counts: Iterable[tuple[int, str]]) -> list[str]:
    return [f"{place}: {count}" for count, place in counts]


def _attributes(owner: ast.ClassDef) -> set[str]:
    """Return the names that a class annotates, and the names that its methods assign to `self`."""
    annotated = [node.target for node in owner.body if isinstance(node, ast.AnnAssign)]
    names = {target.id for target in annotated if isinstance(target, ast.Name)}
    for method in owner.body:
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
            names |= {target.attr for target, _ in _assignments(method) if _is_own(target)}
    return names


def _method_names(owner: ast.ClassDef) -> list[str]:
    """Return the names of a class's methods, its properties left out."""
    return [
        node.name
        for node in owner.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not any("property" in ast.unparse(one) or ".setter" in ast.unparse(one) for one in node.decorator_list)
    ]


def _assignments(tree: ast.AST) -> Iterator[tuple[ast.Attribute, ast.expr | None]]:
    """Yield each attribute that is assigned in a tree, with the value, if it is assigned alone."""
    for node in ast.walk(tree):
        single = [node.target] if isinstance(node, ast.AnnAssign) else []
        for target in node.targets if isinstance(node, ast.Assign) else single:
            if isinstance(target, ast.Attribute):
                yield target, getattr(node, "value", None)
            elif isinstance(target, ast.Tuple):
                yield from ((one, None) for one in target.elts if isinstance(one, ast.Attribute))


def _is_own(target: ast.Attribute) -> bool:
    return isinstance(target.value, ast.Name) and target.value.id in {"self", "cls"}


def _callables_set_from_outside(modules: list[Module]) -> list[str]:
    """Return the places that assign a callable to an attribute of another object: each class of ours that annotates its
    name says that it is callable, or the value is a lambda or a `partial`.
    """
    aliases = {
        target.id
        for module in modules
        for node in module.tree.body
        if isinstance(node, ast.Assign) and "Callable[" in ast.unparse(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    called = re.compile(rf"\b(?:Callable|{'|'.join(sorted(aliases)) or 'Callable'})\b")
    annotated = [
        (getattr(node.target, "attr", None) or getattr(node.target, "id", ""), ast.unparse(node.annotation))
        for module in modules
        for owner in module.nodes
        if isinstance(owner, ast.ClassDef)
        for node in [*owner.body, *(one for one in ast.walk(owner) if _is_attribute(one))]
        if isinstance(node, ast.AnnAssign)
    ]
    names = {name for name, annotation in annotated if called.match(annotation)}
    names -= {name for name, annotation in annotated if not called.match(annotation)}
    return [
        f"{module.place(target)}: {ast.unparse(target)}"
        for module in modules
        for target, value in _assignments(module.tree)
        if not _is_own(target) and (target.attr in names or _is_function(value))
    ]


def _is_attribute(node: ast.AST) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute)


def _is_function(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Lambda) or (isinstance(value, ast.Call) and ast.unparse(value.func) == "partial")


def _constants_of_core(modules: list[Module]) -> list[str]:
    """Return the numbers that modules of the core name in capitals."""
    return [
        f"{module.place(node)}: {name}"
        for module in modules
        if str(module.path).startswith(CORE)
        for node in module.tree.body
        if isinstance(node, ast.Assign)
        for name in _named_numbers(node)
    ]


def _named_numbers(node: ast.Assign) -> Iterator[str]:
    """Yield the names in capitals to which a statement assigns a number each."""
    for target in node.targets:
        pairs = [(target, node.value)]
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(target.elts, node.value.elts, strict=False))
        yield from (ast.unparse(name) for name, value in pairs if ast.unparse(name).isupper() and _is_number(value))


def _is_number(value: ast.expr) -> bool:
    """Return True for an expression of numbers and operators alone."""
    if isinstance(value, ast.BinOp):
        return _is_number(value.left) and _is_number(value.right)
    if isinstance(value, ast.UnaryOp):
        return _is_number(value.operand)
    return isinstance(value, ast.Constant) and type(value.value) in {int, float}


def _packed(modules: list[Module]) -> Figure:
    """Count calls with a star before a tuple or list that is written there."""
    stars = [(module, star) for module in modules for star in _stars(module.tree)]
    found = [
        f"{module.place(star)}: {ast.unparse(star)}"
        for module, star in stars
        if isinstance(star.value, ast.Tuple | ast.List)
    ]
    return Figure("star-packed argument lists", len(found), found)


def _stars(scope: ast.AST) -> Iterator[ast.Starred]:
    for call in ast.walk(scope):
        if isinstance(call, ast.Call):
            yield from (argument for argument in call.args if isinstance(argument, ast.Starred))


def _riddles(root: Path) -> Figure:
    """Count lines with words that stand for a noun that is not said."""
    files = [path for folder in TEXTS for path in (root / folder).rglob("*") if path.suffix in {".py", ".md"}]
    found = [
        f"{path.relative_to(root)}:{number}: {line.strip():.100}"
        for path in sorted([*files, *root.glob("*.md")])
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if RIDDLE_WORDS.search(line)
    ]
    return Figure("riddles: lines with so many, whoever or whatever", len(found), found)


# Tests --------------------------------------------------------------------------------------------------------------


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
    yield Figure(f"{name}: calls", trip.total(), [f"{file}: {count}" for file, count in trip.most_common()])
    yield Figure(f"{name}: files of its calls", len(trip))
    lines = sum(len((ROOT / file).read_text().splitlines()) for file in trip)
    yield Figure(f"{name}: lines of the files of its calls", lines)


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
        print(f"{'':70}{'before':>8}{'now':>8}")
    for figure in figures:
        kept = "" if before is None else f"{before[figure.name]:g}" if figure.name in before else "-"
        print(f"{figure.name:70}{kept:>8}{figure.value:>8g}")


if __name__ == "__main__":
    sys.exit(main())
