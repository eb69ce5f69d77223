"""What an editor says of a policy file, and what the gateway does."""

import json
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from jsonschema import Draft202012Validator

from quotas.policy.policy import Policy
from quotas.policy.policy_text import policy_text
from quotas.policy.schema import SCHEMA, fields_of, schema_text
from tests.examples import examples
from tests.quotas.policies import EXAMPLES, POLICIES, as_json, parsed, policies, problems_of
from tests.quotas.policy.test_policy_file import MISTAKES

VALID = (
    "tenants:",
    "tenants: {a: }",
    "tenants: {a: {weight: 2}, b: {weight: 0.5}, c: {weight: '3'}}",
    "tenants: {a: {limits: {tokens: 100k/min}}}",
    "tenants: {a: {limits: {tokens: [100k/min, {rate: 5/h, burst: 10}, 50M/month]}}}",
    "tenants: {a: {limits: {tokens: unlimited, kv_bytes: 1.5GiB, concurrent_requests: 32, queued_requests: 1k}}}",
    "tenants: {a: {price: none}, b: {price: {input: 0.5/1M, output: 0.002/1k, currency: USD}}}",
    "tenants: {a: {keys: {ab: {expires: 2027-01-31, scopes: [inference], limits: {requests: 5/s}}, cd: }}}",
    "classes: {a: {ttft: 500ms, queue: {requests: 256, tokens: 1M, bytes: 64MiB, seconds: 0.5s}}, b: {aging: 0s}}",
    "classes: {a: {service_tiers: [fast, flex]}, b: }\ndefaults: {highest_class: a, models: [x/y, '*']}",
    "defaults:\ntenants: {no: {on_store_outage: open}}",
    "unnamed_tenants: refuse\ntenants: {a: }",
    "unnamed_tenants: allow",
    "defaults: {prefix_cache: {floor: 0B, ceiling: 1GiB}}\ntenants: {a: {prefix_cache: {ceiling: unlimited}}}",
    "prefix_sharing: {acme: [a, b], 010: [c, no]}\ntenants: {a: , b: , c: , no: }",
    "prefix_sharing:\ntenants: {a: {prefix_cache: }}",
    "tenants: {a: {prefix_cache: {pinned: [You are brief., 'Two']}}, b: {prefix_cache: {pinned: none}}}",
)
INVALID = (
    *(text for text, _ in MISTAKES),
    "words",
    "unnamed_tenants: maybe",
    "unnamed_tenants: {}",
    "unnamed_tenants:",
    "defaults: {unnamed_tenants: refuse}",
    "tenants: {-a: {}}",
    "tenants: {a b: {}}",
    "tenants: {a: {wieght: 2}}",
    "tenants: {a: {weight: 1001}}",
    "tenants: {a: {weight: -1}}",
    "tenants: {a: {weight: .inf}}",
    "tenants: {a: {weight: 1:30}}",
    "tenants: {a: {weight: yes}}",
    "tenants: {a: {weight: true}}",
    "tenants: {a: {models: x}}",
    "tenants: {a: {limits: {token: 5/min}}}",
    "tenants: {a: {limits: {tokens: 5}}}",
    "tenants: {a: {limits: {tokens: 1e400/min}}}",
    "tenants: {a: {limits: {tokens: -5/min}}}",
    "tenants: {a: {limits: {tokens: 05/min}}}",
    "tenants: {a: {limits: {tokens: {rate: 5/min, brust: 1}}}}",
    "tenants: {a: {limits: {kv_bytes: 1024}}}",
    "tenants: {a: {limits: {kv_bytes: 2G}}}",
    "tenants: {a: {limits: {concurrent_requests: -1}}}",
    "tenants: {a: {price: {input: 1/1M}}}",
    "tenants: {a: {price: {input: 1, output: 1/1M, currency: USD}}}",
    "tenants: {a: {keys: {k: {hmac: abc}}}}",
    "tenants: {a: {keys: {k: {weight: 1}}}}",
    "classes: {}",
    "classes: {a: {service_tiers: []}}",
    "classes: {a: {ttft: 500}}",
    "classes: {a: {ttft: 0.0ms}}",
    "classes: {a: {queue: {length: 5}}}",
    "classes: {a: {queue: {requests: 2.5}}}",
    "classes: {" + ", ".join(f"c{number}: {{}}" for number in range(17)) + "}",
)
VALIDATOR = Draft202012Validator(SCHEMA)


def accepted(text: str) -> bool:
    return bool(VALIDATOR.is_valid(as_json(text)))


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(SCHEMA)


def test_the_file_is_the_schema_of_the_code() -> None:
    text = (POLICIES / "policy.schema.json").read_text(encoding="utf-8")
    assert text == schema_text(), "write it anew: sluice policy schema > policies/policy.schema.json"


@pytest.mark.parametrize("text", VALID)
def test_editor_and_gateway_accept_the_same(text: str) -> None:
    assert not problems_of(text)
    assert accepted(text)


@pytest.mark.parametrize("text", INVALID)
def test_editor_and_gateway_refuse_the_same(text: str) -> None:
    assert problems_of(text)
    assert not accepted(text)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_names_the_schema_and_follows_it(path: Any) -> None:
    text = path.read_text(encoding="utf-8")
    first = text.partition("\n")[0]
    named = first.removeprefix("# yaml-language-server: $schema=")
    assert (path.parent / named).resolve() == POLICIES / "policy.schema.json"
    VALIDATOR.validate(as_json(text))


@settings(max_examples=examples(25), deadline=None)
@given(policies())
def test_the_schema_accepts_every_policy_that_is_shown(policy: Policy) -> None:
    VALIDATOR.validate(as_json(policy_text(policy)))


def test_a_policy_that_is_shown_names_every_field() -> None:
    shown = as_json(policy_text(parsed((POLICIES / "examples" / "short_chat.yaml").read_text(encoding="utf-8"))))
    assert list(shown) == list(fields_of(""))
    assert set(shown["defaults"]) == set(fields_of("defaults"))
    assert set(shown["tenants"]["support-desk"]) == set(fields_of("tenant"))
    assert set(shown["tenants"]["free-trial"]["limits"]) == set(fields_of("limits"))


def test_every_field_is_described() -> None:
    def undescribed(schema: Any, path: str) -> list[str]:
        found = []
        for name, inner in schema.get("properties", {}).items():
            target = SCHEMA["$defs"][inner["$ref"].rpartition("/")[2]] if "$ref" in inner else inner
            described = "description" in target or any("description" in option for option in target.get("anyOf", []))
            found += [] if described or "$ref" in str(target) else [f"{path}.{name}"]
            found += undescribed(inner, f"{path}.{name}")
        return found

    assert not [name for key, schema in SCHEMA["$defs"].items() for name in undescribed(schema, key)]
    assert json.loads(schema_text()) == SCHEMA


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_valid_as_tools_of_yaml_1_1_read_it(path: Any) -> None:
    """Those take a bare date for a timestamp, which no JSON Schema has a type for."""
    Draft202012Validator(SCHEMA).validate(yaml.safe_load(path.read_text(encoding="utf-8")))
