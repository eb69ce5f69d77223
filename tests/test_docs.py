"""What the documents name, link to and show is there and is true."""

import ast
import json
import re
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from admission.event_logs import names as event_log_names
from gateway.admin import request_storage
from gateway.tenants import key_store
from quotas.policy.schema import fields_of
from tests.deploy.dashboard import PANELS
from tests.quotas.policies import parsed, problems_of

ROOT = Path(__file__).parents[1]
PACKAGES = ("sluice", "fleet", "gateway", "admission", "quotas", "backend", "labs")
TOPS = "|".join((*PACKAGES, "deploy", "docs", "examples", "policies", "scripts", "tests"))
ELSEWHERE = (
    "README.md",
    "examples/README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "labs/benchmarks/README.md",
    "backend/embedded/README.md",
)
DOCUMENTS = sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / path for path in ELSEWHERE)])
NAMES_OF_SOURCE = {"architecture", "engine", "glossary", "prefix_cache", "recipes"}
OF_THE_SOURCE = [path for path in DOCUMENTS if path.stem in NAMES_OF_SOURCE or path.parent.name == "decisions"]

PATH = re.compile(rf"(?<![\w./-])(?:{TOPS})/[\w./-]*\w|(?<![\w./-])[\w./-]*\w\.(?:py|lua|cpp|js)\b")
MODULE = re.compile(r"(?<![\w./-])(?:gateway|admission|quotas|backend|labs|scripts|tests)(?:\.\w+)+(?![\w/])")
CLASS = re.compile(r"`([A-Z][a-z]\w*)((?:\.\w+)*)(?:\(\))?`")
WORD = re.compile(r"`(_?[a-z]\w*_\w+)(?:\(\))?`")
STRANGER = re.compile(r"\binstall(?: [^\s;&|`]+)*? ['\"]?sluice(?:\[[\w,]*\])?['\"]?(?![\w./;-])")
LINK = re.compile(r"\]\(([^)\s]+)\)")
# class names of others, or words that only look like a class's name
FOREIGN = {"FlowControl", "HttpToolsProtocol", "RequestResponseCycle", "Host"}
OF_USERS = {"policies/acme.yaml", "llama.cpp"}  # a file of a user's own, in examples, and a project called as one


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def classes() -> dict[str, set[str]]:
    """The classes of the packages, each with the names that occur in the body of any class of that name."""
    found: dict[str, set[str]] = {}
    for package in PACKAGES:
        for source in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    members = found.setdefault(node.name, set())
                    members |= {inner.name for inner in node.body if hasattr(inner, "name")}
                    named = [inner for inner in ast.walk(node) if isinstance(inner, ast.Attribute | ast.Name)]
                    members |= {inner.attr if isinstance(inner, ast.Attribute) else inner.id for inner in named}
    return found


@cache
def words() -> set[str]:
    """All words of the packages' sources."""
    sources = [path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.suffix in {".py", ".lua"}]
    return {word for source in sources for word in re.findall(r"\w+", source.read_text(encoding="utf-8"))}


@cache
def names_of_tests() -> set[str]:
    sources = (ROOT / "tests").rglob("test_*.py")
    return {word for source in sources for word in re.findall(r"\bdef (test_\w+)", source.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_every_file_that_is_named_exists(document: Path) -> None:
    named = {path.rstrip("/") for path in PATH.findall(document.read_text(encoding="utf-8"))}
    missing = {path for path in named - OF_USERS if not ((ROOT / path).exists() or (document.parent / path).exists())}
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_every_module_that_is_named_exists(document: Path) -> None:
    """The last word of a dotted name may be something that the module defines."""
    named = {dotted for dotted in MODULE.findall(document.read_text(encoding="utf-8")) if not dotted.endswith(".md")}
    missing = {dotted for dotted in named if not (is_module(dotted) or is_defined(*dotted.rpartition(".")[::2]))}
    assert not missing


def is_module(dotted: str) -> bool:
    path = ROOT / dotted.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file() or path.is_file()


def is_defined(module: str, attribute: str) -> bool:
    path = ROOT / module.replace(".", "/")
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return source.is_file() and re.search(rf"\b{attribute}\b", source.read_text(encoding="utf-8")) is not None


@pytest.mark.parametrize("document", OF_THE_SOURCE, ids=name)
def test_every_class_that_is_named_exists_and_has_the_member_that_is_named(document: Path) -> None:
    named = set(CLASS.findall(document.read_text(encoding="utf-8")))
    unknown = {owner for owner, _ in named if owner not in classes()} - FOREIGN
    assert not unknown
    members = {(owner, path.split(".")[1]) for owner, path in named if path}
    missing = {f"{owner}.{member}" for owner, member in members if member not in classes()[owner]}
    assert not missing


@pytest.mark.parametrize("document", OF_THE_SOURCE, ids=name)
def test_every_identifier_that_is_named_occurs_in_the_source(document: Path) -> None:
    unknown = set(WORD.findall(document.read_text(encoding="utf-8"))) - words() - names_of_tests()
    assert not unknown


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_every_link_leads_somewhere(document: Path) -> None:
    targets = [target for target in LINK.findall(document.read_text(encoding="utf-8")) if "://" not in target]
    missing = {target for target in targets if not is_there(document, *target.partition("#")[::2])}
    assert not missing


def is_there(document: Path, path: str, anchor: str) -> bool:
    target = document.parent / path if path else document
    if not target.exists():
        return False
    headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
    return not anchor or anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("folder", ["docs", "docs/decisions"])
def test_the_index_has_every_page(folder: str) -> None:
    index = (ROOT / folder / "README.md").read_text(encoding="utf-8")
    pages = {path.name for path in (ROOT / folder).glob("*.md")} - {"README.md"}
    assert pages == {target for target in LINK.findall(index) if "/" not in target}


def test_nobody_is_told_to_install_a_strangers_package() -> None:
    """On PyPI `sluice` is another project."""
    assert STRANGER.search("pip install -U 'sluice[ray]'") and not STRANGER.search("pip install '.[ray]'; sluice serve")
    folders = [ROOT / folder for folder in (*PACKAGES, "labs", "deploy", "examples", "scripts")]
    sources = [
        path for folder in folders for path in folder.rglob("*") if path.suffix in {"", ".py", ".yaml", ".service"}
    ]
    texts = {path: path.read_text(encoding="utf-8") for path in [*DOCUMENTS, *sources] if path.is_file()}
    assert [name(path) for path, text in texts.items() if STRANGER.search(text)] == []


def test_the_glossary_is_sorted_and_says_where_each_term_lives() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = [row.strip("| ").split(" | ") for row in text.splitlines() if row.startswith("| ")][1:]
    terms = [term for term, _, _ in rows]
    assert terms == sorted(terms, key=str.lower)
    assert all(meaning.endswith(".") for _, meaning, _ in rows)
    assert all(PATH.search(place) for _, _, place in rows)


def test_the_architecture_is_read_in_an_afternoon() -> None:
    assert len((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines()) <= 250


def test_the_table_of_rooms_has_every_room() -> None:
    rooms = {name(path.parent) for package in PACKAGES for path in (ROOT / package).glob("*/__init__.py")}
    table = re.findall(
        r"^\| `([\w/]+)` \|", (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert rooms - set(table) == set()


POLICIES = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```yaml\n(.*?)```", POLICIES, re.DOTALL)


@pytest.mark.parametrize("text", BLOCKS)
def test_every_block_of_yaml_about_policies_is_a_policy(text: str) -> None:
    assert parsed(text).tenants


def test_the_mistakes_that_are_shown_are_what_is_said_of_them() -> None:
    shown = re.findall(r"^policies/acme\.yaml(:.*)$", POLICIES, re.MULTILINE)
    text = "# acme\ntenants:\n  acme:\n    limits: {tokens: 100k/mn}\n    wieght: 2\n"
    assert [problem.removeprefix("a.yaml") for problem in problems_of(text)] == shown


def test_every_field_of_a_policy_is_in_a_table() -> None:
    rows = set(re.findall(r"^\| `([a-z_.]+)` \|", POLICIES, re.MULTILINE))
    queue = {f"queue.{name}" for name in fields_of("class", "queue")}
    cache = {f"{one}.{name}" for one in ("prefix_cache", "guardrail") for name in fields_of(one)}
    documented = {*fields_of("class"), *fields_of("tenant"), *fields_of("limits"), *fields_of("key")} - {"queue"}
    documented |= {*fields_of("team")}
    alone = {*fields_of("")} - {"classes", "defaults", "teams", "tenants"}  # each of these is a section
    assert rows == documented | queue | cache | alone


def test_every_example_of_a_number_is_accepted() -> None:
    rows = dict(re.findall(r"^\| (count|size|duration|rate|budget|price) \| ([^|]*) \|", POLICIES, re.MULTILINE))
    uses = {
        "count": "tenants: {a: {limits: {concurrent_requests: #}}}",
        "size": "tenants: {a: {limits: {kv_bytes: #}}}",
        "duration": "classes: {a: {ttft: #}}",
        "rate": "tenants: {a: {limits: {tokens: #}}}",
        "budget": "tenants: {a: {limits: {tokens: #}}}",
        "price": "tenants: {a: {price: {input: #, output: 1/1M, currency: USD}}}",
    }
    assert rows.keys() == uses.keys()
    for kind, examples in rows.items():
        for example in re.findall(r"`([^`]+)`", examples):
            assert not problems_of(uses[kind].replace("#", example))


def test_every_file_that_is_linked_exists() -> None:
    links = re.findall(r"\]\((\.\./[^)]+)\)", POLICIES)
    assert links
    assert all((Path(__file__).parents[1] / "docs" / link).is_file() for link in links)


DIAGNOSIS = (ROOT / "docs" / "diagnosis.md").read_text()


def test_every_finding_has_a_row() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "gateway" / "doctor").glob("*_findings.py"))
    names = set(re.findall(r"return Finding\(\n?\s*f?\"(\w+)", sources))
    assert len(names) > 20
    assert {name for name in names if f"`{name}" not in DIAGNOSIS} == set()


def test_the_panels_that_are_named_exist() -> None:
    titles = {panel["title"] for panel in PANELS}
    table = DIAGNOSIS.partition("| what is seen | panel |")[2].partition("\n\n")[0]
    named = re.findall(r"^\| [^|]+ \| ([^|]+) \|", table, re.MULTILINE)
    assert len(named) == 9
    assert {title for titles_of_row in named for title in titles_of_row.split("; ")} <= titles
    assert set(re.findall(r"(?<!\*)\*([A-Z][^*\n]+)\*(?!\*)", DIAGNOSIS)) <= titles
    assert set(re.findall(r"^panel '([^']+)'", DIAGNOSIS, re.MULTILINE)) <= titles


def test_every_code_of_an_error_is_in_a_reference_page() -> None:
    sources = [ROOT / path for path in ("gateway/errors.py", "gateway/grammar_errors.py", "fleet/errors.py")]
    codes = {code for path in sources for code in re.findall(r'code = "(\w+)"', path.read_text(encoding="utf-8"))}
    pages = "".join((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") for page in ("api", "overload"))
    assert {code for code in codes if f"`{code}`" not in pages} == set()


CONSTANT = re.compile(r"^\| ((?:`[A-Z_]+`(?:, )?)+) \| ([\d.]+) [^|]*\| `([\w/]+)\.py` \|", re.MULTILINE)


def test_the_constants_of_the_rule_are_those_of_the_source() -> None:
    shown = CONSTANT.findall((ROOT / "docs/fairness.md").read_text(encoding="utf-8"))
    assert len(shown) > 10
    for names, value, module in shown:
        source = import_module(module.replace("/", "."))
        assert {getattr(source, one) for one in re.findall(r"\w+", names)} == {float(value)}, names


def test_the_versions_of_stored_data_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+ \| `([^`]+)` \| (\d+) \|", text, re.MULTILINE)
    assert {place: int(version) for place, version in rows} == {
        "keys.json": json.loads(key_store.FORMAT)["version"],
        request_storage.FILE: request_storage.VERSION,
        "--event-log": event_log_names.VERSION,
    }
