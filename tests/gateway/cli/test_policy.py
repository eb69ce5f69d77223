import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from redis import Redis

from gateway.tenants.auth import new_key
from gateway.tenants.key_store import KeyStore
from quotas.policy.limit import Limit
from quotas.policy.policy_file import read_policy
from quotas.reservation import Usage
from tests.gateway.cli.conftest import Printed, Sluice
from tests.gateway.spending import spend
from tests.quotas.policies import EXAMPLES, POLICIES

OLD = "tenants: {acme: {weight: 2, limits: {tokens: 100k/min}}, gone: {weight: 2}, same: {weight: 5}}"
NEW = (
    "classes: {interactive: {ttft: 1s}, batch: {service_tiers: [flex]}}\n"
    "defaults: {limits: {requests: [5/s, {rate: 100/h, burst: 10}]}}\n"
    "tenants: {acme: {limits: {tokens: 200k/min}, keys: {ab12: {scopes: [limits]}}}, late: , same: {weight: 5}}"
)

ASKED = """
tenants:
  acme:
    highest_class: standard
    models: [small, large]
    limits: {requests: 3/h, tokens: [{rate: 1k/h, burst: 500}, 10k/month], kv_bytes: 2GiB}
    keys:
      ab12: {models: [small], limits: {requests: 5/day}, hmac: %s}
      cd34: {scopes: [limits]}
  free:
"""

Explained = Callable[..., tuple[int, list[str]]]
BAD_RATE = '"100k/mn" is not a rate such as 100k/min or 50M/month'


def written(folder: Path, name: str, text: str) -> Path:
    (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder / f"{name}.yaml"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return written(tmp_path, "old", OLD)


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return written(tmp_path, "new", NEW)


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    return written(tmp_path, "broken", "tenants:\n  acme:\n    limits: {tokens: 100k/mn}\n    wieght: 2\n")


def test_check_says_where_each_mistake_is_and_exits_with_1(sluice: Sluice, broken: Path) -> None:
    done = sluice("policy", "check", broken)
    assert (done.status, done.out) == (1, "")
    assert done.err.splitlines() == [
        f'{broken}:3:22: tenants.acme.limits.tokens: {BAD_RATE}; did you mean "100k/min"?',
        f'{broken}:4:5: tenants.acme: "wieght" is not a field; did you mean "weight"?',
        "sluice: 2 problems: no policy can be made of this",
    ]


def test_check_repeats_no_key(sluice: Sluice, tmp_path: Path) -> None:
    key = f"sk-sluice-{'7' * 40}"
    (tmp_path / "keys.yaml").write_text(f"tenants:\n  {key}: {{}}\n  acme: {{keys: {{k1: {{hmac: {key}}}}}}}\n")
    done = sluice("policy", "check", str(tmp_path / "keys.yaml"))
    assert (done.status, done.err.count("***"), "7777" in done.err) == (1, 2, False)


def test_check_counts_what_it_found_and_exits_with_0(printed: Printed) -> None:
    version = read_policy(POLICIES).version
    assert printed("policy", "check", POLICIES) == f"valid: 1 file, 3 classes, 0 tenants, 0 keys; version {version}\n"


def test_check_takes_several_paths_each_a_policy_of_its_own(sluice: Sluice, broken: Path, old: Path, new: Path) -> None:
    done = sluice("policy", "check", new, broken, old)
    assert done.status == 1
    assert [line.split(": valid")[0] for line in done.out.splitlines()] == [str(new), str(old)]
    assert all(line.startswith((str(broken), "sluice: 2 problems")) for line in done.err.splitlines())


def test_check_lists_stored_keys_whose_tenant_is_not_named(tmp_path: Path, old: Path, sluice: Sluice) -> None:
    store = KeyStore(tmp_path / "state")
    for tenant in ("acme", "acmee", "acmee"):
        store.add(new_key(tenant, store.pepper())[1])
    done = sluice("policy", "check", old, "--state-dir", store.directory)
    assert done.status == 0
    (line,) = done.err.splitlines()
    assert line.startswith("warning: a stored key's tenant is not named: acmee (2 keys, ")
    assert line.endswith('nothing limits it; did you mean "acme"?')
    done = sluice("policy", "check", POLICIES, "--state-dir", store.directory)
    assert (done.status, done.err) == (0, ""), "a policy that names nobody says the same of all"


def test_check_compares_floors_with_the_kv_memory_that_it_is_told(tmp_path: Path, sluice: Sluice) -> None:
    text = "tenants:\n  a: {prefix_cache: {floor: 1GiB}}\n  b: {prefix_cache: {floor: 2GiB}}\n"
    path = written(tmp_path, "floors", text)
    assert sluice("policy", "check", path).status == 0
    assert sluice("policy", "check", path, "--kv-memory-bytes", "4GiB").status == 0
    done = sluice("policy", "check", path, "--kv-memory-bytes", "3GiB")
    assert done.status == 1
    assert done.err.splitlines()[0] == (
        f"{path}:3:22: tenants.b.prefix_cache.floor: floors keep 3GiB in all, and --kv-memory-bytes is 3GiB: one "
        "sequence of max_model_len must fit beside them"
    )


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_output_of_show_is_the_same_policy(path: Path, tmp_path: Path, printed: Printed) -> None:
    shown = written(tmp_path, "shown", printed("policy", "show", path))
    assert read_policy(shown) == read_policy(path)
    assert printed("policy", "diff", path, shown)


def test_show_of_one_tenant_leaves_the_others_out(old: Path, tmp_path: Path, printed: Printed) -> None:
    for name, weight in (("acme", 2), ("stranger", 1)):
        tenants = read_policy(written(tmp_path, name, printed("policy", "show", old, "--tenant", name))).tenants
        assert (list(tenants), tenants[name].weight) == ([name], weight)


def test_diff_says_what_changes_for_whom(old: Path, new: Path, sluice: Sluice) -> None:
    done = sluice("policy", "diff", old, new)
    assert done.status == 1
    lines = done.out.splitlines()
    acme = lines[lines.index("tenant acme") : lines.index("tenant gone (no longer named: the defaults hold)")]
    assert lines[0] == "classes: interactive, standard, batch -> interactive, batch"
    assert "class standard (removed)" in lines
    assert "  ttft: 500ms -> 1s" in lines
    assert lines[lines.index("tenants that are not named") + 1 :][:2] == [
        "  default_class: standard -> interactive",
        "  limits.requests: unlimited -> 5/s, 100/h (burst 10)",
    ]
    assert acme[1:] == [
        "  weight: 2 -> 1",
        "  default_class: standard -> interactive",
        "  limits.requests: unlimited -> 5/s, 100/h (burst 10)",
        "  limits.tokens: 100k/min -> 200k/min",
        "  keys.ab12.scopes: unset -> limits",
        "  keys.ab12.models: unset -> *",
        *[f"  keys.ab12.limits.{name}: unset -> unlimited" for name in ("requests", "input_tokens", "output_tokens")],
        *[f"  keys.ab12.limits.{name}: unset -> unlimited" for name in ("tokens", "cost", "concurrent_requests")],
    ]
    assert "tenant late (now named)" in lines


def test_diff_of_a_policy_with_itself_is_nothing(old: Path, printed: Printed) -> None:
    assert printed("policy", "diff", old, old) == "nothing changes\n"


def test_diff_with_a_broken_policy_exits_with_2(old: Path, broken: Path, sluice: Sluice) -> None:
    assert sluice("policy", "diff", old, broken)[:2] == (2, "")
    assert sluice("policy", "show", broken)[:2] == (1, "")


def test_schema_prints_the_schema(printed: Printed) -> None:
    assert json.loads(printed("policy", "schema"))["$defs"]["tenant"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["policy", "chekc"], "invalid choice: 'chekc'"),
        (["policy", "check"], "required: PATH"),
        (["policy", "show", "x", "--tenant", "a b"], "'a b' is no name of a tenant"),
    ],
)
def test_a_command_asked_for_wrongly_exits_with_2(arguments: list[str], complaint: str, sluice: Sluice) -> None:
    done = sluice(*arguments)
    assert (done.status, complaint in done.err) == (2, True)


def test_a_path_that_is_not_there_is_named(sluice: Sluice) -> None:
    done = sluice("policy", "check", "nowhere.yaml")
    assert done.status == 1
    assert done.err.startswith("nowhere.yaml: cannot be read: No such file or directory\n")


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLUICE_STATE_DIR", str(tmp_path / "state"))
    return written(tmp_path, "asked", ASKED % ("0" * 64))


@pytest.fixture
def explained(sluice: Sluice) -> Explained:
    def explain(path: Path, *arguments: str) -> tuple[int, list[str]]:
        done = sluice("policy", "explain", path, *arguments)
        return done.status, done.out.splitlines()

    return explain


def charged(policy: Path) -> tuple[Limit, ...]:
    return tuple(limit for limit in read_policy(policy).tenant("acme").limits_of("ab12") if limit.is_charged)


def test_explain_tells_the_class_the_limits_and_what_is_left_of_each(
    asked: Path, redis_url: str, explained: Explained
) -> None:
    spend(redis_url, "acme", "ab12", Usage(100, 50), charged(asked))
    which = ("--key", "ab12", "--model", "small", "--service-tier", "fast", "--input", "300", "--output", "50")
    status, lines = explained(asked, *which, "--redis-url", redis_url)
    assert status == 0
    assert lines[1:3] == [
        "tenant acme, key ab12",
        "class standard (targets: first token in 2s, each further one in 80ms)",
    ]
    rows = [line.split() for line in lines[4:-1]]
    assert [row[: 6 if "burst" in row[2] else 4] for row in rows] == [
        ["requests/h", "3", "1", "2"],
        ["tokens/h", "1k", "(burst", "500)", "350", "350"],
        ["tokens/month", "10k", "350", "9850"],
        ["kv_bytes", "2GiB", "-", "-"],
        ["key:ab12:requests/day", "5", "1", "4"],
    ]
    assert rows[0][4] == "in"
    assert rows[2][-1] == "UTC"
    assert lines[-1] == "it would pass"


def test_explain_names_every_limit_that_refuses(asked: Path, redis_url: str, explained: Explained) -> None:
    limits = charged(asked)
    for _ in range(3):
        spend(redis_url, "acme", "ab12", Usage(100, 20), limits)
    which = ("--key", "ab12", "--input", "450", "--output", "51", "--redis-url", redis_url)
    status, lines = explained(asked, *which)
    assert status == 1
    refusals = [line for line in lines if line.startswith("it would be refused: ")]
    assert [line.split()[4] for line in refusals] == ["requests/h", "tokens/h"]
    assert "asked 1, left 0; it suffices in" in refusals[0]
    assert "asked 501, left 500; it never holds more than 500" in refusals[1]


def test_explain_charges_nothing(asked: Path, redis_url: str, explained: Explained) -> None:
    limits = charged(asked)
    spend(redis_url, "acme", "ab12", Usage(100, 20), limits)
    with Redis.from_url(redis_url) as client:
        before = {key: client.dump(key) for key in client.scan_iter()}
        for _ in range(5):
            assert explained(asked, "--key", "ab12", "--redis-url", redis_url)[0] == 0
        assert {key: client.dump(key) for key in client.scan_iter()} == before


def test_explain_knows_a_stored_key_and_how_the_policy_narrows_it(
    asked: Path, redis_url: str, explained: Explained
) -> None:
    store = KeyStore(asked.parent / "state")
    _, late = new_key("acme", store.pepper(), datetime.now(UTC) - timedelta(days=1))
    _, narrow = new_key("free", store.pepper(), scopes=("limits",))
    settings = '{"classes": ["batch"], "limits": {"tokens": "2k/day"}}'
    _, own = new_key("free", store.pepper(), settings=settings)
    for record in (late, narrow, own):
        store.add(record)
    status, lines = explained(asked, "--key", late.id, "--redis-url", redis_url)
    assert (status, lines[-1].split(" at ")[0]) == (1, "it would be refused: the key expired")
    status, lines = explained(asked, "--key", narrow.id)
    assert (status, lines[1]) == (1, f"tenant free, key {narrow.id}")
    assert lines[-1].endswith("may not be used for inference: its scopes are limits.")
    status, lines = explained(asked, "--key", own.id, "--service-tier", "priority", "--input", "2001")
    assert (status, lines[2]) == (1, "no class")
    assert "may not have the class interactive" in lines[-2] and f"key:{own.id}:tokens/day is 2000" in lines[-1]


@pytest.mark.parametrize(
    ("which", "reason"),
    [
        (("--key", "ab12", "--model", "large"), "The model 'large' does not exist or you have no access to it."),
        (("--tenant", "acme", "--model", "huge"), "The model 'huge' does not exist or you have no access to it."),
        (("--key", "cd34"), "This API key may not be used for inference: its scopes are limits."),
        (("--tenant", "acme", "--input", "501"), "tokens/h is 1000: asked 502, left 500; it never holds more than 500"),
    ],
)
def test_without_a_store_explain_tells_the_limits_alone(
    asked: Path, which: tuple[str, ...], reason: str, explained: Explained, sluice: Sluice
) -> None:
    status, lines = explained(asked, *which)
    assert (status, lines[-1]) == (1, f"it would be refused: {reason}")
    told = sluice("policy", "explain", asked, "--tenant", "acme")
    assert (told.status, told.out.splitlines()[-1]) == (2, "nothing in the policy alone refuses it")
    assert told.err.startswith("sluice: the rest of the limits is unknown: no quotas are kept here")


@pytest.mark.parametrize("tenant", ["free", "stranger"])
def test_explain_needs_no_store_where_there_are_no_limits(asked: Path, tenant: str, explained: Explained) -> None:
    status, lines = explained(asked, "--tenant", tenant, "--service-tier", "flex")
    assert (status, lines[2:]) == (0, ["class batch (without targets)", "no limits apply", "it would pass"])
    assert ("its defaults hold" in lines[1]) == (tenant == "stranger")


def test_explain_of_what_cannot_be_told_exits_with_2(asked: Path, broken: Path, sluice: Sluice) -> None:
    told = sluice("policy", "explain", asked, "--key", "\x1bnone")
    assert told[:2] == sluice("policy", "explain", broken, "--tenant", "acme")[:2] == (2, "")
    assert "\x1b" not in told.err
    assert "neither in" in told.err
    assert sluice("policy", "explain", asked).status == 2
