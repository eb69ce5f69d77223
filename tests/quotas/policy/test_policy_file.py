import errno
import os
import re
import unicodedata
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quotas.policy.limit import Budget, BudgetPeriod, Limit, Rate, Resource
from quotas.policy.policy import DEFAULT_POLICY, CacheLimits, ClassPolicy, Policy, Price, QueueLimits
from quotas.policy.policy_file import PolicyError, parse_policy, read_policy
from quotas.policy.policy_text import policy_text
from quotas.policy.yaml_nodes import MAX_BYTES
from tests.examples import examples
from tests.quotas.policies import EXAMPLES, POLICIES, parsed, policies, problems_of

TWO_CLASSES = "classes: {high: {service_tiers: [fast]}, low: {service_tiers: [flex]}}\n"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_a_policy(path: Path) -> None:
    assert read_policy(path).classes


def test_the_default_file_says_what_a_gateway_without_a_policy_does() -> None:
    assert read_policy(POLICIES / "default.yaml") == DEFAULT_POLICY == parsed("tenants:")


def test_the_folder_of_policies_is_one_policy() -> None:
    assert read_policy(POLICIES) == DEFAULT_POLICY


def test_a_class_is_read_with_all_its_fields() -> None:
    first, second = parsed(
        "classes:\n  a: {}\n  b: {service_tiers: [priority, fast], ttft: 500ms, time_per_output_token: 50ms,\n"
        "    aging: 3s, queue: {requests: 256, tokens: 1M, bytes: 64MiB, seconds: 30s}}"
    ).classes
    assert first == ClassPolicy("a", 0)
    assert second == ClassPolicy("b", 1, ("fast", "priority"), 0.5, 0.05, 3.0, QueueLimits(256, 10**6, 2**26, 30.0))


def test_classes_age_by_twenty_seconds_each_unless_they_say() -> None:
    found = parsed("classes: {a: {}, b: {ttft: 1s}, c: {}, d: {aging: 1min}, e: {}}").classes
    assert [entry.aging for entry in found] == [0.0, 20.0, 40.0, 60.0, 80.0]


def test_a_tenant_is_read_with_all_its_fields() -> None:
    tenant = parsed(
        "tenants: {acme: {weight: 2.5, models: [a, b], highest_class: standard, default_class: batch,\n"
        "  limits: {requests: [20k/day, 600/min], tokens: {rate: 100k/min, burst: 20k}, kv_bytes: 2GiB,\n"
        "           concurrent_requests: 0}, on_store_outage: closed, max_n: 4, max_top_logprobs: 0,\n"
        "            max_schema_bytes: 500,\n"
        "  price: {input: 0.5/1M, output: 1.5/1M, currency: USD},\n"
        "  keys: {ab12: {expires: 2027-01-31, scopes: [limits], models: [b], highest_class: batch,\n"
        f"         hmac: {'AB' * 32}, limits: {{requests: 5/s, concurrent_requests: 3}}}}}}}}}}"
    ).tenant("acme")
    assert (tenant.weight, tenant.models, tenant.on_store_outage) == (2.5, ("a", "b"), "closed")
    assert (tenant.highest_class, tenant.default_class) == ("standard", "batch")
    assert (tenant.max_n, tenant.max_top_logprobs, tenant.max_schema_bytes) == (4, 0, 500)
    assert tenant.limits == (
        Limit(Resource.REQUESTS, 600, Rate(60, 600)),
        Limit(Resource.REQUESTS, 20_000, Budget(BudgetPeriod.DAY)),
        Limit(Resource.TOKENS, 100_000, Rate(60, 20_000)),
        Limit(Resource.CONCURRENT_REQUESTS, 0),
        Limit(Resource.KV_BYTES, 2**31),
    )
    assert tenant.price == Price(Decimal("5e-7"), Decimal("1.5e-6"), Decimal("5e-7"), Decimal("1.5e-6"), "USD")
    key = tenant.keys["ab12"]
    assert (key.hmac, key.expires) == ("ab" * 32, datetime(2027, 1, 31, tzinfo=UTC))
    assert (key.scopes, key.models, key.highest_class) == (("limits",), ("b",), "batch")
    assert [limit.name for limit in key.limits] == ["key:ab12:requests/s", "key:ab12:concurrent_requests"]


def test_a_tenant_has_the_defaults_where_it_says_nothing() -> None:
    found = parsed(
        "defaults: {weight: 3, limits: {tokens: [100k/min, 1M/day], requests: 5/s}, price: {input: 1/1M, output: 1/1M, "
        "currency: EUR}}\ntenants: {a: {limits: {tokens: 5/min}}, b: {limits: {requests: unlimited}, price: none}, c: }"
    )
    assert [limit.name for limit in found.tenant("a").limits] == ["requests/s", "tokens/min"]
    assert [limit.name for limit in found.tenant("b").limits] == ["tokens/min", "tokens/day"]
    assert (found.tenant("a").price, found.tenant("b").price) == (found.default.price, None)
    assert found.tenant("c").limits == found.tenant("stranger").limits == found.default.limits


def test_an_inherited_default_class_gives_way_to_a_lower_highest_class() -> None:
    found = parsed(TWO_CLASSES + "defaults: {default_class: high}\ntenants: {a: {highest_class: low}}")
    assert found.tenant("a").default_class == "low"


def test_the_default_class_is_the_highest_where_none_is_said() -> None:
    assert parsed(TWO_CLASSES + "tenants: {a: {highest_class: low}}").default.default_class == "high"


@pytest.mark.parametrize("name", ["no", "on", "true", "null", "010", "1e3", "0x10", "2027-01-31", "default", "a.b-c_d"])
def test_names_that_yaml_takes_for_something_else_stay_names(name: str) -> None:
    assert list(parsed(f"tenants: {{{name}: {{weight: 2}}}}").tenants) == [name]


def test_a_size_beyond_all_machines_is_refused_in_units_of_sizes() -> None:
    (problem,) = problems_of("tenants: {a: {limits: {kv_bytes: 9999TB}}}")
    assert 'kv_bytes: "9999TB" is not within 0B and 1000TB' in problem


@pytest.mark.parametrize(
    "name",
    ["-a", ".a", "_a", "a b", "a{b}", "a:b", "a/b", "'a\\0'", "a*", "é", "a" * 65, '"a\\nb"', '"a\\""', "'{acme}'",
     "''", '"\\u202Ea"', "'a$(x)'", "'KEYS[1]'"],
)  # fmt: skip
def test_names_that_would_mean_something_to_a_store_or_a_shell_are_refused(name: str) -> None:
    (problem,) = problems_of(f"tenants:\n  ? {name}\n  : {{weight: 2}}")
    assert "is no name of a tenant" in problem
    assert problem.isprintable()


MISTAKES = [
    ("tenants: {a: {limits: {tokens: 5/mn}}}", 'a.yaml:1:32: tenants.a.limits.tokens: "5/mn" is not a rate'),
    ("tenants:\n  a:\n    wieght: 2", 'a.yaml:3:5: tenants.a: "wieght" is not a field; did you mean "weight"?'),
    ("tenant: {}", 'a.yaml:1:1: "tenant" is not a field; did you mean "tenants"?'),
    ("tenants: {a: {on_store_outage: shut}}", '"shut" is not an outage policy: closed, open or lease'),
    ("tenants: {a: {weight: 0}}", "is not within 0.001 and 1000"),
    ("tenants: {a: {max_n: 0}}", 'tenants.a.max_n: "0" is not within 1 and 128'),
    ("tenants: {a: {max_n: 129}}", 'a.yaml:1:22: tenants.a.max_n: "129" is not within 1 and 128'),
    ("tenants: {a: {max_schema_bytes: 300000}}", 'max_schema_bytes: "300000" is not within 0 and 262144'),
    ("tenants: {a: {max_top_logprobs: 21}}", 'max_top_logprobs: "21" is not within 0 and 20'),
    ("tenants: {a: {limits: {requests: 0}}}", 'requests: "0" is not a rate such as 100k/min or 50M/month'),
    ("tenants: {a: {weight: 1e400}}", "is not a number such as"),
    ("tenants: {a: {weight: [1]}}", "should have one value, got a list"),
    ("tenants: {a: {weight: }}", "should have one value, got nothing"),
    ("tenants: {a: {models: qwen}}", 'should be a list such as [a, b], got "qwen"'),
    ("tenants: {a: {models: []}}", "should be a list such as [a, b], got an empty list"),
    ("tenants: {a: {models: [x, x]}}", '"x" is a second time in the list'),
    ("tenants: {a: {models: ['']}}", "is no name of a model"),
    (f"tenants: {{a: {{models: {list(range(300))}}}}}", "has 300 items: at most 256"),
    (f"classes: {{{', '.join(f'c{number}: ' for number in range(17))}}}", "has 17 classes, not 1 to 16"),
    ("tenants: {a: 5}", 'tenants.a: should hold fields such as `name: value`, got "5"'),
    ("tenants: [a]", "tenants: should hold fields such as `name: value`, got a list"),
    ("tenants: {a: {limits: {tokens: []}}}", "is an empty list"),
    ("tenants: {a: {limits: {tokens: [1/min, unlimited]}}}", "cannot be one of several limits"),
    ("tenants: {a: {limits: {tokens: {burst: 1}}}}", "has no rate"),
    ("tenants: {a: {limits: {tokens: {rate: 1/min, brust: 1}}}}", 'did you mean "burst"?'),
    ("tenants: {a: {limits: {concurrent_requests: 5/min}}}", "is not a whole number"),
    ("tenants: {a: {limits: {kv_bytes: -1}}}", "is not a size"),
    ("tenants: {a: {price: {input: 1/1M, output: 1/1M}}}", "has no currency"),
    ("tenants: {a: {price: {input: 1/1M, output: 1/1M, currency: usd}}}", "is no currency"),
    ("tenants: {a: {price: 5}}", "should hold fields"),
    ("tenants: {a: {keys: {a-b: {}}}}", '"a-b" is no id of a key'),
    ("tenants: {a: {keys: {k: {scopes: []}}}}", "should be a list such as [a, b], got an empty list"),
    ("tenants: {a: {keys: {k: {scopes: [admin]}}}}", '"admin" is not a scope: inference or limits'),
    ("tenants: {a: {keys: {k: {hmac: 12}}}}", "is no HMAC-SHA-256"),
    ("tenants: {a: {keys: {k: {limits: {kv_bytes: 1GiB}}}}}", "is counted for tenants alone"),
    ("defaults: {keys: {}}", 'defaults: "keys" is not a field'),
    ("tenants: {a: {rpm: 600}}", '"rpm" is not a field; here it is limits: {requests: 600/min}'),
    ("overload: {prefer: tokens}", 'a.yaml:1:1: "overload" is not a field any more: '),
    ("tenants: {a: {limits: {tpm_limit: 1}}}", '"tpm_limit" is not a field; here it is limits: {tokens: 100k/min}'),
    ("defaults: {max_parallel_requests: 5}", "here it is limits: {concurrent_requests: 32}"),
    ("tenants: {a: {prefix_cache: {floor: 64}}}", 'tenants.a.prefix_cache.floor: "64" is not a size'),
    ("tenants: {a: {prefix_cache: {floor: unlimited}}}", "is not a size"),
    ("tenants: {a: {prefix_cache: {cieling: 1GiB}}}", 'did you mean "ceiling"?'),
    ("tenants: {a: {prefix_cache: 1GiB}}", "should hold fields"),
    ("tenants: {a: {prefix_cache: {pinned: Be brief.}}}", 'should be a list such as [a, b], got "Be brief."'),
    ("tenants: {a: {prefix_cache: {pinned: []}}}", "should be a list such as [a, b], got an empty list"),
    ("tenants: {a: {prefix_cache: {pinned: [x, x]}}}", '"x" is a second time in the list'),
    ("tenants: {a: {prefix_cache: {pinned: ['']}}}", '"" is no system prompt: write the text'),
    (f"tenants: {{a: {{prefix_cache: {{pinned: [{'x' * 65_537}]}}}}}}",
     "has 65,537 characters: at most 65,536 can be pinned, leave out what differs"),
    (f"tenants: {{a: {{prefix_cache: {{pinned: [{', '.join(f'p{n}' for n in range(17))}]}}}}}}",
     "tenants.a.prefix_cache.pinned: has 17 system prompts: at most 16 of a tenant stay"),
    ("prefix_sharing: [a, b]\ntenants: {a: , b: }", "prefix_sharing: should hold fields"),
    ("prefix_sharing: {x: a}\ntenants: {a: , b: }", 'prefix_sharing.x: should be a list such as [a, b], got "a"'),
    ("prefix_sharing: {a b: [a, b]}\ntenants: {a: , b: }", '"a b" is no name of a group'),
    ("prefix_sharing: {x: [a]}\ntenants: {a: , b: }",
     "a.yaml:1:21: prefix_sharing.x: has a single tenant: name two or more"),
    ("prefix_sharing: {x: [a, b, a]}\ntenants: {a: , b: }", '"a" is a second time in the list'),
    ("classes:", "has 0 classes, not 1 to 16"),
    ("classes: {A: {}}", '"A" is no name of a class'),
    ("classes: {a: {service_tiers: [default]}}", '"default" is the default_class of each tenant'),
    ("classes: {a: {ttft: 0s}}", "must be above zero"),
    ("classes: {a: {ttft: 1:30}}", "is not a duration"),
    ("classes: {a: {queue: {requests: 0}}}", "is not within 1 and"),
    ("- a", "a.yaml:1:1: should hold fields: classes, defaults, tenants"),
    ("just words", "a.yaml:1:1: should hold fields: classes, defaults, tenants"),
]  # fmt: skip
MISTAKES_THAT_NO_SCHEMA_SEES = [
    ("tenants: {a: {limits: {tokens: 5B/min}}}",
     'a.yaml:1:32: tenants.a.limits.tokens: "5B/min" is not within 1 and 4B'),
    ("tenants: {a: {limits: {tokens: {rate: 5/h, burst: 4.1B}}}}",
     'a.yaml:1:51: tenants.a.limits.tokens.burst: "4.1B" is not within 1 and 4B'),
    ("tenants: {a: {highest_class: standrad}}", 'did you mean "standard"?'),
    ("tenants: {a: {highest_class: batch, default_class: standard}}", '"standard" is more urgent than the highest'),
    ("tenants: {a: {limits: {tokens: [1/min, 2/min]}}}", "has two limits per min"),
    ("tenants: {a: {limits: {tokens: {rate: 1/day, burst: 1}}}}", "a budget has no burst"),
    ("tenants: {a: {keys: {k: }}, b: {keys: {k: }}}", "is a key already at a.yaml:1:22"),
    ("tenants: {a: {keys: {k: {expires: 2027-02-30}}}}", "is not a date or time such as"),
    ("tenants: {a: {keys: {k: {expires: 2027-02-03T10:00}}}}", "has no zone"),
    ('tenants: {a: {keys: {k: {expires: "9999-12-31T23:59:59-14:00"}}}}', "is in no year from 1 to 9999 in UTC"),
    ('tenants: {a: {keys: {k: {expires: "0001-01-01T00:00:00+14:00"}}}}', "leave it out for no expiry"),
    ("tenants: {a: {models: [x], keys: {k: {models: [y]}}}}", '"y" is not among its tenant\'s models'),
    ("tenants: {a: {highest_class: batch, keys: {k: {highest_class: standard}}}}", "is above its tenant's, batch"),
    ("classes: {a: {service_tiers: [fast]}, b: {service_tiers: [fast]}}", '"fast" asks for class a already'),
    ("classes: {a: {aging: 1s}}", "no class is due before the first"),
    ("classes: {a: , b: {aging: 9s}, c: {aging: 8s}}", "is shorter than that of b, which is more urgent"),
    ("tenants: {a: {prefix_cache: {floor: 2GiB, ceiling: 1GiB}}}",
     "a.yaml:1:37: tenants.a.prefix_cache.floor: is above the ceiling, 1GiB: lower it, or raise the ceiling"),
    ("defaults: {prefix_cache: {floor: 2MiB}}\ntenants: {a: {prefix_cache: {ceiling: 1MiB}}}",
     "tenants.a.prefix_cache.ceiling: is below the floor of defaults, 2MiB: raise it, or lower floor"),
    ("aliases: {fast: [small, fast]}", 'aliases.fast: "fast" is the alias itself: name models of the server'),
    ("aliases: {fast: [small=9, big]}", "aliases.fast: gives some models a weight: give one to each, or to none"),
    ("aliases: {fast: [small=9, small=1]}", "aliases.fast: names a model twice"),
    ("aliases: {fast: [small=0, big=1]}", "is not within 0.001 and 1000"),
    ("aliases: {fast: [small], best: [fast]}", 'aliases.best: "fast" is an alias, too: name models of the server'),
    ("prefix_sharing: {x: [acme, acme_eu]}\ntenants: {acme: , acme-eu: }",
     'prefix_sharing.x: "acme_eu" is no tenant of this policy: name it under tenants; did you mean "acme-eu"?'),
    ("prefix_sharing: {x: [a, b], y: [b, c]}\ntenants: {a: , b: , c: }",
     'a.yaml:1:33: prefix_sharing.y: "b" is in group x already: a tenant shares with one group'),
    ("", "a.yaml: is empty"),
    ("# nothing\n", "a.yaml: is empty"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "complaint"), [*MISTAKES, *MISTAKES_THAT_NO_SCHEMA_SEES])
def test_a_mistake_is_found_at_its_place_and_alone(text: str, complaint: str) -> None:
    (problem,) = problems_of(text)
    assert complaint in problem
    assert problem.startswith("a.yaml:")


def test_all_mistakes_of_all_files_are_reported_at_once_in_order() -> None:
    found = problems_of("tenants:\n  a: {weight: x}\n  b: {wieght: 1}", "tenants: {c: {models: x}}", "a: [", b"\xff")
    assert [problem.split(": ")[0] for problem in found] == [
        "a.yaml:2:15", "a.yaml:3:7", "b.yaml:1:23", found[3].split(": ")[0], "d.yaml:1:1",
    ]  # fmt: skip


def test_a_class_of_a_file_that_cannot_be_read_is_not_missed_in_the_others() -> None:
    (problem,) = problems_of("classes: {mine: {}\n", "tenants: {a: {highest_class: mine}}")
    assert "is not YAML" in problem


def test_cached_memory_has_a_floor_and_a_ceiling_each_as_the_defaults_have_it_where_a_tenant_does_not_say() -> None:
    found = parsed(
        "defaults: {prefix_cache: {ceiling: 1GiB}}\n"
        "tenants: {a: {prefix_cache: {floor: 64MiB}}, b: {prefix_cache: {ceiling: unlimited}}, c: }"
    )
    assert found.tenant("a").prefix_cache == CacheLimits(2**26, 2**30)
    assert found.tenant("b").prefix_cache == CacheLimits(0, None)
    assert found.tenant("c").prefix_cache == CacheLimits(0, 2**30)
    assert parsed("tenants: {a: }").tenant("a").prefix_cache == CacheLimits()


def test_pinned_prompts_are_word_for_word_the_defaults_or_the_tenants() -> None:
    found = parsed(
        "defaults: {prefix_cache: {pinned: [Be brief.]}}\n"
        "tenants:\n  a:\n  b: {prefix_cache: {pinned: none}}\n  c:\n    prefix_cache:\n      pinned:\n"
        "        - |-\n          You are\n            indented.\n        - |\n          A last line.\n"
    )
    assert found.cache_limits("a").pinned == ("Be brief.",)
    assert found.cache_limits("b").pinned == ()
    assert found.cache_limits("c").pinned == ("You are\n  indented.", "A last line.\n")
    assert found.cache_limits("stranger").pinned == (), "nobody could say how many there will be"


def test_a_group_may_have_tenants_of_several_files() -> None:
    sources = {"a": b"tenants: {acme-eu: }", "b": b"prefix_sharing: {acme: [acme-eu, acme]}", "c": b"tenants: {acme: }"}
    assert parse_policy(sources).prefix_sharing == {"acme": ("acme", "acme-eu")}


def test_files_are_one_policy() -> None:
    sources = {"c": b"classes: {x: {}}", "d": b"defaults: {weight: 2}", "t": b"tenants: {a: }", "u": b"tenants: {b: }"}
    found = parse_policy(sources)
    assert ([entry.name for entry in found.classes], list(found.tenants)) == (["x"], ["a", "b"])
    assert found.tenant("b").weight == 2


@pytest.mark.parametrize(
    ("first", "second", "complaint"),
    [
        ("tenants: {a: }", "tenants: {a: }", "b.yaml:1:11: tenants.a: is a second time here, after a.yaml:1:11"),
        ("classes: {a: }", "classes: {b: }", "b.yaml:1:10: classes: is in a.yaml already"),
        ("defaults: {}", "defaults: {}", "b.yaml:1:11: defaults: is in a.yaml already"),
        ("prefix_sharing: {}", "prefix_sharing: {}", "b.yaml:1:17: prefix_sharing: is in a.yaml already"),
    ],
)
def test_a_value_given_in_two_files_is_refused(first: str, second: str, complaint: str) -> None:
    (problem,) = problems_of(first, second)
    assert problem.startswith(complaint)


def test_of_a_thousand_mistakes_the_first_hundred_are_reported() -> None:
    text = "tenants:\n" + "".join(f"  t{number}: {{weight: x}}\n" for number in range(1000))
    with pytest.raises(PolicyError) as caught:
        parsed(text)
    assert [problem.mark.line for problem in caught.value.problems] == list(range(2, 102))
    assert str(caught.value).endswith("\nand perhaps more")


@pytest.mark.parametrize(
    "text",
    [
        "tenants: {a: {weight: #}}",
        "tenants: {a: {models: #}}",
        "tenants: {a: {models: [#]}}",
        "tenants: {a: {#: 1}}",
        "tenants: {a: #}",
        "tenants: {#: {weight: x}}",
        "tenants: {a: {highest_class: #}}",
        "tenants: {a: {limits: {tokens: #}}}",
        "tenants: {a: {keys: {k: {expires: #}}}}",
        "#: 1",
    ],
)
def test_values_in_errors_are_short_and_harmless(text: str) -> None:
    hostile = '"\\e[2J\\u202e' + "x" * 10_000 + '"'
    (problem,) = problems_of(text.replace("#", hostile))
    assert problem.isprintable()
    assert len(problem) < 300


def test_names_that_differ_in_their_unicode_form_alone_are_one() -> None:
    names = [unicodedata.normalize(form, "café") for form in ("NFC", "NFD")]
    found = problems_of("tenants:\n" + "".join(f"  {name}: {{}}\n" for name in names))
    assert any("is a second time here" in problem for problem in found)


def test_a_folder_is_its_yaml_files_without_hidden_ones_or_folders(tmp_path: Path) -> None:
    for name in ("a.yaml", "b.yml", ".c.yaml", "d.json", "e.yaml~"):
        (tmp_path / name).write_text(f"tenants: {{{name[0].strip('.') or 'hidden'}: }}")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "f.yaml").write_text("nonsense")
    assert list(read_policy(tmp_path).tenants) == ["a", "b"]


def test_a_mounted_config_map_is_read_through_its_links(tmp_path: Path) -> None:
    revision = tmp_path / "..2026_01_01"
    revision.mkdir()
    (revision / "tenants.yaml").write_text("tenants: {acme: }")
    (tmp_path / "..data").symlink_to(revision.name)
    (tmp_path / "tenants.yaml").symlink_to("..data/tenants.yaml")
    assert list(read_policy(tmp_path).tenants) == ["acme"]


def test_places_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "gone.yaml").symlink_to("nowhere")
    (tmp_path / "odd" / "folder.yaml").mkdir()
    os.mkfifo(tmp_path / "odd" / "pipe.yaml")
    (tmp_path / "large.yaml").write_bytes(b"#" * (MAX_BYTES + 1))
    complaints = {
        "missing.yaml": ["missing.yaml: cannot be read: No such file or directory"],
        "empty": ["empty: is a folder without *.yaml files"],
        "odd": ["folder.yaml: is not a file", "gone.yaml: cannot be read: No such file", "pipe.yaml: is not a file"],
        "large.yaml": ["large.yaml: is larger than 4 MiB"],
    }
    for name, expected in complaints.items():
        with pytest.raises(PolicyError) as caught:
            read_policy(tmp_path / name)
        for line, complaint in zip(str(caught.value).splitlines(), expected, strict=True):
            assert complaint in line


def test_a_file_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path, mode: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    (tmp_path / "a.yaml").touch()
    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(PolicyError, match=r"a\.yaml: cannot be read: Permission denied"):
        read_policy(tmp_path)


def test_an_endless_file_is_not_read_to_its_end() -> None:
    with pytest.raises(PolicyError, match="/dev/zero: is not a file"):
        read_policy(Path("/dev/zero"))


@settings(max_examples=examples(25), deadline=None)
@given(policies())
def test_a_policy_shown_as_yaml_reads_as_the_same_policy(policy: Policy) -> None:
    assert parsed(policy_text(policy)) == policy


@settings(deadline=None)
@given(st.sampled_from(EXAMPLES), st.data())
def test_a_slip_of_the_hand_makes_a_policy_or_an_error_with_places(path: Path, data: st.DataObject) -> None:
    text = path.read_text(encoding="utf-8")
    at = data.draw(st.integers(0, len(text)))
    cut, typed = data.draw(st.integers(0, 8)), data.draw(st.text("ab0:-{}[]&*!|>'\"%@ \n\t/.,~é\x00", max_size=4))
    for problem in problems_of(text[:at] + typed + text[at + cut :]):
        assert re.match(r"a\.yaml:[0-9]+:[0-9]+: ", problem)
