"""Shows how the source is laid out, and how much a request crosses of it: `python -m scripts.structure`.

It reads the five packages, `labs`, `scripts` and the tests, and runs `sluice serve` to count calls
(scripts/request_path.py says how). `--list` shows what is behind every count, `--json FILE` keeps the figures, and
`--compare FILE` shows kept figures beside the present ones.
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
        *_names(modules),
        *_classes(modules),
        *_docstrings(modules),
        *_tests(root, modules),
        *(Figure(f"lines of {folder}", sum(module.num_lines for module in found)) for folder, found in beside.items()),
        *_packed([*modules, *(module for found in beside.values() for module in found)]),
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
    """Return the places where each name is defined at the top of a module."""
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


def _packed(modules: list[Module]) -> Iterator[Figure]:
    """Count calls with a star before a tuple or list that is written there, or before a local name for one."""
    literal, named = set[str](), set[str]()
    for module in modules:
        for scope in module.nodes:
            if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
                tuples = _local_tuples(scope)
                for star in _stars(scope):
                    place = f"{module.place(star)}: {ast.unparse(star)}"
                    if isinstance(star.value, ast.Tuple | ast.List):
                        literal.add(place)
                    elif isinstance(star.value, ast.Name) and star.value.id in tuples:
                        named.add(place)
    yield Figure("star-packed argument lists", len(literal), sorted(literal))
    yield Figure("calls that unpack a local tuple", len(named), sorted(named))


def _stars(scope: ast.AST) -> Iterator[ast.Starred]:
    for call in ast.walk(scope):
        if isinstance(call, ast.Call):
            yield from (argument for argument in call.args if isinstance(argument, ast.Starred))


def _local_tuples(scope: ast.AST) -> set[str]:
    found = [node for node in ast.walk(scope) if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)]
    return {target.id for node in found for target in node.targets if isinstance(target, ast.Name)}


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


# Docstrings -----------------------------------------------------------------------------------------------------------

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
    yield Figure(f"{name}: lines of the files of its calls", sum(_num_lines(ROOT / file) for file in trip.calls))


def _num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


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
