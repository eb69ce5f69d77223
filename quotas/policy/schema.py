"""The format of policy files as JSON Schema (2020-12), for editors; policies/policy.schema.json is its text.

Names of fields, patterns of text and choices are here alone: the parser asks this schema for them. A schema cannot see
some mistakes, such as a class that does not exist or a key that is given twice, which only the parser finds.

It is not a pydantic model: docs/decisions/policy_reader.md says why.
"""

import json
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any, get_args

from quotas.policy.limit import TENANT_ONLY, WEEKDAYS, Resource
from quotas.policy.policy import (
    MAX_BACKGROUND_RESPONSES,
    MAX_BATCH_LINES,
    MAX_GUARDRAIL_HOLD_CHARS,
    MAX_N,
    MAX_OPEN_BATCHES,
    MAX_SCHEMA_BYTES,
    MAX_TAGS,
    MAX_TOP_LOGPROBS,
    MAX_USAGE_PARTS,
    MAX_USAGE_ROWS,
    SCOPES,
    SERVICE_TIERS,
    GuardrailFailure,
    GuardrailStage,
    Lateness,
    LogTexts,
    Outage,
    Unnamed,
)
from quotas.policy.units import COUNT, DURATION, MONEY_BUDGET, NUMBER, PERCENT, PRICE, RATE, SHARE, SIZE

UNLIMITED = "unlimited"
NO_PRICE = "none"
NO_PINS = "none"
NO_GUARDRAIL = "none"
NO_TEAM = "none"
NO_ADAPTER = "none"
MAX_CLASSES = 16
MAX_PINNED_PROMPTS = 16  # system prompts of a tenant
MAX_PROMPT_CHARS = 65_536  # characters of one
OUTAGES: tuple[Outage, ...] = get_args(Outage)
LATENESS: tuple[Lateness, ...] = get_args(Lateness)
UNNAMED: tuple[Unnamed, ...] = get_args(Unnamed)
GUARDRAIL_STAGES: tuple[GuardrailStage, ...] = get_args(GuardrailStage)
LOG_TEXTS: tuple[LogTexts, ...] = get_args(LogTexts)
GUARDRAIL_FAILURES: tuple[GuardrailFailure, ...] = get_args(GuardrailFailure)

TENANT_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
GROUP_NAME = TEAM_NAME = TENANT_NAME
TIME_ZONE = r"[A-Za-z][A-Za-z0-9_+-]*(/[A-Za-z0-9_+-]+)*"
CLASS_NAME = r"[a-z][a-z0-9_-]{0,31}"
KEY_PREFIX = "sk-sluice-"  # of an API key
KEY_ID = r"[A-Za-z0-9]{1,64}"  # a dash ends the id within a key
HMAC = r"[0-9A-Fa-f]{64}"
URL = r"https?://[!-~]+"
WEIGHT_MARK = "="  # behind a model of an alias, before its weight
MODEL = r"[!-~]([ -~]{0,254}[!-~])?"
CURRENCY = r"[A-Z]{3}"
TAG_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}"
TAG_VALUE = r"[A-Za-z0-9][A-Za-z0-9._:/@ -]{0,63}"
USAGE_PART = rf"user|session|metadata\.{TAG_NAME}"
GUARDRAIL_URL = r"https?://([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(:[0-9]{1,5})?(/[!-~]{0,1024})?"

Schema = dict[str, Any]


def _text(pattern: str, description: str) -> Schema:
    return {"type": "string", "pattern": f"^({pattern})$", "description": description}


def _number(kind: str, pattern: str, description: str, **more: Any) -> Schema:
    """Describe text that YAML takes for a number, where it is written without a unit, or is a name such as 1e3."""
    return {**_text(pattern, description), "type": ["string", kind], "minimum": 0, **more}


def _words(words: Sequence[str], description: str) -> Schema:
    return _list({"enum": list(words)}, description)


def _list(items: Schema, description: str) -> Schema:
    return {"type": "array", "minItems": 1, "uniqueItems": True, "items": items, "description": description}


def _fields(description: str, /, **properties: Schema) -> Schema:
    return {
        "type": ["object", "null"],
        "description": description,
        "additionalProperties": False,
        "properties": properties,
    }


def _requiring(schema: Schema, *names: str) -> Schema:
    return schema | {"type": "object", "required": list(names)}


def _named(pattern: str, description: str, values: Schema) -> Schema:
    return {
        "type": ["object", "null"],
        "description": description,
        "propertyNames": {"pattern": f"^({pattern})$"},
        "additionalProperties": values,
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def _positive(schema: Schema) -> Schema:
    return schema | {"not": {"pattern": r"^0(\.0+)?[^.0-9]"}}


_CLASS_NAME = _text(CLASS_NAME, "The name of a class.")
_MODELS = _list(_text(MODEL, "A model's name; * for all."), 'The models that may be used; ["*"] for all.')


def _class() -> Schema:
    return _fields(
        "A class of service; the first is the most urgent.",
        service_tiers=_words(SERVICE_TIERS, "Values of service_tier in requests that ask for this class."),
        ttft=_positive(_text(DURATION, "Target of the time to the first token, such as 500ms.")),
        when_late={
            "enum": list(LATENESS),
            "description": "What becomes of a request whose first token is expected later than ttft.",
        },
        time_per_output_token=_positive(_text(DURATION, "Target of the time for each further token, such as 50ms.")),
        max_reasoning_tokens=_number("integer", COUNT, "The most tokens of an answer's reasoning.", minimum=1),
        aging=_text(DURATION, "How much later its requests are due than those of the first class."),
        queue=_fields(
            "The most that may wait in this class, over all tenants.",
            requests=_number("integer", COUNT, "Such as 256.", minimum=1),
            tokens=_number("integer", COUNT, "Of their prompts, such as 1M.", minimum=1),
            bytes=_text(SIZE, "Of their bodies, such as 64MiB."),
            seconds=_positive(_text(DURATION, "Of engine time, predicted, such as 30s.")),
        ),
    )


def _rate() -> Schema:
    rate = _text(RATE, "Such as 100k/min (a rate: /s, /min, /h) or 50M/month (a budget: /day, /week, /month).")
    with_burst = _fields(
        "A rate that allows another burst than its own amount.",
        rate=rate,
        burst=_number("integer", COUNT, "The most that may be spent at once.", minimum=1),
    )
    budget = _budget(_text(RATE, "Such as 50M/month."))
    return {"anyOf": [rate, _requiring(with_burst, "rate"), _requiring(budget, "budget")]}


def _budget(budget: Schema) -> Schema:
    alert = _fields(
        "A signed message, sent once in a period of the budget.",
        at=_text(PERCENT, "The share of the budget at which it is sent, such as 80%."),
        url=_text(URL, "Where it is sent, such as https://example.com/alerts."),
    )
    return _fields(
        "A budget with alerts.",
        budget=budget,
        soft={"type": "boolean", "description": "true: nothing is refused, the alerts are all there is."},
        alerts=_list(_requiring(alert, "at", "url"), "Up to eight alerts."),
    )


def _limits(resources: list[Resource], description: str) -> Schema:
    return _fields(description, **{resource.value: _limit(resource) for resource in resources})


def _limit(resource: Resource) -> Schema:
    unlimited = {"const": UNLIMITED}
    if resource is Resource.KV_BYTES:
        return {"anyOf": [_text(SIZE, "Bytes of KV memory in use at once, such as 2GiB."), unlimited]}
    if resource is Resource.COST:
        money = _text(MONEY_BUDGET, "In the currency of the tenant's price, such as 100/month or 12.50/day.")
        budget: Schema = {"anyOf": [money, _requiring(_budget(money), "budget")]}
        return {"anyOf": [budget, _list(budget, "Several budgets, all of which hold."), unlimited]}
    if resource.is_held:
        return {"anyOf": [_number("integer", COUNT, "How many at once, such as 32; 0 for none."), unlimited]}
    return {"anyOf": [_ref("rate"), _list(_ref("rate"), "Several windows, all of which hold."), unlimited]}


def _price() -> Schema:
    amount = _text(PRICE, "For tokens, such as 0.5/1M.")
    amounts = {
        "input": amount,
        "output": amount,
        "cached_input": _text(PRICE, "For prompt tokens found in the prefix cache; default: as input."),
        "reasoning": _text(PRICE, "For output tokens of an answer's reasoning; default: as output."),
        "batch": _number(
            "number", SHARE, "The share of each price that a token costs in a batch; default: 1.", maximum=1
        ),
    }
    of_model = _fields("What its tokens cost; what it leaves out is as for all others.", **amounts)
    priced = _fields(
        "What tokens cost.",
        currency=_text(CURRENCY, "ISO 4217, such as USD."),
        models=_named(MODEL, "Models and adapters, by name, that have prices of their own.", of_model),
        **amounts,
    )
    return {"anyOf": [_requiring(priced, "input", "output", "currency"), {"const": NO_PRICE}]}


def _prefix_cache() -> Schema:
    size = _text(SIZE, "Such as 64MiB; 0B for none.")
    return _fields(
        "The tenant's cached KV memory that no request uses.",
        floor=size | {"description": "The part that is never evicted for others, such as 64MiB; default: none."},
        ceiling={"anyOf": [size | {"description": "The most, such as 1GiB."}, {"const": UNLIMITED}]},
        pinned={
            "anyOf": [
                _list(
                    {"type": "string", "minLength": 1, "maxLength": MAX_PROMPT_CHARS}, "System prompts, word for word."
                )
                | {"maxItems": MAX_PINNED_PROMPTS},
                {"const": NO_PINS},
            ],
            "description": "System prompts that stay once they were computed; none lifts those of defaults.",
        },
    )


def _guardrail() -> Schema:
    return _fields(
        "A service that judges prompts and answers.",
        url=_text(GUARDRAIL_URL, "Where it is asked, by POST, such as http://guardrail:8080/check."),
        stages=_words(GUARDRAIL_STAGES, "What it judges; default: both."),
        deadline=_positive(_text(DURATION, "The most time of one call, such as 500ms; default: 1s.")),
        on_failure={
            "enum": list(GUARDRAIL_FAILURES),
            "description": "What becomes of a request without a verdict: closed refuses it, open lets it pass.",
        },
        hold=_number(
            "integer",
            COUNT,
            "Characters of a stream that wait for one verdict; default: 400.",
            minimum=1,
            maximum=MAX_GUARDRAIL_HOLD_CHARS,
        ),
    )


def _calendar() -> dict[str, Schema]:
    return {
        "time_zone": _text(TIME_ZONE, "Where the days of budgets begin, such as Europe/Berlin; default: UTC."),
        "week_starts": {"enum": list(WEEKDAYS), "description": "The first day of a budget's weeks; default: monday."},
    }


def _defaults() -> dict[str, Schema]:
    return {
        "team": _number(
            "number", TEAM_NAME, "The team whose limits hold besides the tenant's; none lifts that of defaults."
        ),
        **_calendar(),
        "weight": _number("number", NUMBER, "Share of the machine when others wait too.", minimum=0.001, maximum=1000),
        "models": _MODELS,
        "default_adapter": _text(MODEL, "The adapter of requests for the served model; none: the model itself."),
        "highest_class": _CLASS_NAME | {"description": "The most urgent class that may be had."},
        "default_class": _CLASS_NAME | {"description": "The class of requests that ask for none."},
        "limits": _ref("limits"),
        "on_store_outage": {"enum": list(OUTAGES), "description": "What happens when the quota store is away."},
        "price": _price(),
        "prefix_cache": _ref("prefix_cache"),
        "stored_responses": _ref("stored_responses"),
        "batches": _ref("batches"),
        "usage": _ref("usage"),
        "guardrail": {
            "anyOf": [_ref("guardrail"), {"const": NO_GUARDRAIL}],
            "description": "none lifts the default.",
        },
        "log_texts": {
            "enum": list(LOG_TEXTS),
            "description": "Whether the log of requests has prompts and answers, by the tenant's consent: without "
            "e-mail addresses, long numbers and keys (redacted), or whole.",
        },
        "max_n": _number("integer", COUNT, "The most answers to one prompt: n, or best_of.", minimum=1, maximum=MAX_N),
        "max_schema_bytes": _number(
            "integer",
            COUNT,
            "The most bytes of a schema or another grammar of answers, or of tools whose calls it constrains.",
            maximum=MAX_SCHEMA_BYTES,
        ),
        "max_top_logprobs": _number(
            "integer", COUNT, "The most of the likeliest tokens told of at each position.", maximum=MAX_TOP_LOGPROBS
        ),
    }


def _key() -> Schema:
    return _fields(
        "How a key narrows what its tenant may do.",
        hmac=_text(HMAC, "HMAC-SHA-256 of the key under the pepper, if the key is not in the state directory."),
        expires={"type": "string", "description": "A date in UTC, or a time with its zone."},
        scopes=_words(SCOPES, "What the key is for; default: all."),
        models=_MODELS,
        highest_class=_CLASS_NAME | {"description": "The most urgent class that may be had with it."},
        classes=_list(_CLASS_NAME, "The classes that may be had with it; default: all up to the highest."),
        limits=_limits([one for one in Resource if one not in TENANT_ONLY], "Limits besides the tenant's."),
        tags=_named(TAG_NAME, "For reports of spend.", _number("number", TAG_VALUE, "Such as search."))
        | {"maxProperties": MAX_TAGS},
    )


def _schema() -> Schema:
    classes = _named(CLASS_NAME, "From the most urgent to the least.", _ref("class"))
    top = _fields(
        "A policy file: classes of service, defaults for all tenants, and tenants.",
        classes=classes | {"type": "object", "minProperties": 1, "maxProperties": MAX_CLASSES},
        defaults=_ref("defaults"),
        tenants=_named(TENANT_NAME, "What each tenant may do.", _ref("tenant")),
        teams=_named(TEAM_NAME, "Limits that the tenants of a team share, by the team's name.", _ref("team")),
        unnamed_tenants={
            "enum": list(UNNAMED),
            "description": "Whether tenants that are not named here are served, as defaults says; default: allow.",
        },
        prefix_sharing=_named(
            GROUP_NAME,
            "Groups of tenants that find each other's cached prefixes; a tenant is in one at most.",
            _list(_number("number", TENANT_NAME, "A tenant of this policy."), "The tenants of the group.")
            | {"minItems": 2},
        ),
        aliases=_named(
            MODEL,
            "Names that requests may give as their model, and the models that serve them.",
            _list(
                _text(MODEL, "A model, or with its part of the traffic model=9."),
                "Tried in this order, or first the one that is drawn by weight, until one does not refuse for load.",
            ),
        ),
    )
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Sluice policy",
        **top,
        "type": "object",
        "minProperties": 1,
        "$defs": {
            "class": _class(),
            "defaults": _fields("Of every tenant, and all there is of tenants that are not named.", **_defaults()),
            "tenant": _fields(
                "Fields that are left out are as in defaults.",
                **_defaults(),
                keys=_named(KEY_ID, "API keys of this tenant, by id.", _ref("key")),
            ),
            "team": _fields(
                "Limits of all tenants that name this team, together.",
                limits=_limits(
                    [resource for resource in Resource if resource not in TENANT_ONLY],
                    "What its tenants may spend or hold together.",
                ),
                currency=_text(CURRENCY, "ISO 4217, such as EUR: that of limits.cost, and of its tenants' prices."),
                **_calendar(),
            ),
            "limits": _limits(list(Resource), "What may be spent or held; unlimited lifts one of the defaults."),
            "prefix_cache": _prefix_cache(),
            "stored_responses": _fields(
                "What is stored of /v1/responses and /v1/conversations, for turns that follow.",
                bytes=_text(SIZE, "The most of the tenant, such as 64MiB; the oldest make room. 0B: none are stored."),
                retention=_positive(_text(DURATION, "How long a response is stored, such as 30d.")),
                background=_number(
                    "integer",
                    COUNT,
                    "The most responses in the background at once; 0: none.",
                    maximum=MAX_BACKGROUND_RESPONSES,
                ),
            ),
            "batches": _fields(
                "Bounds of /v1/files and /v1/batches.",
                file_bytes=_text(SIZE, "The most of all files of the tenant, such as 1GiB. 0B: it has none."),
                retention=_positive(_text(DURATION, "How long files and ended batches are kept, such as 30d.")),
                lines=_number("integer", COUNT, "The most lines of a batch.", minimum=1, maximum=MAX_BATCH_LINES),
                open=_number("integer", COUNT, "The most batches at once.", minimum=1, maximum=MAX_OPEN_BATCHES),
            ),
            "usage": _fields(
                "How finely the ledger tells use apart, besides key, model and class.",
                by=_list(_text(USAGE_PART, "user, session, or metadata.NAME."), "Parts of requests; default: user.")
                | {"maxItems": MAX_USAGE_PARTS},
                rows=_number(
                    "integer",
                    COUNT,
                    "Rows of a day, beyond which users and tags are summed up.",
                    maximum=MAX_USAGE_ROWS,
                ),
            ),
            "guardrail": _guardrail(),
            "rate": _rate(),
            "key": _key(),
        },
    }


SCHEMA = _schema()


def schema_text() -> str:
    return json.dumps(SCHEMA, indent=2) + "\n"


@cache
def fields_of(name: str, *path: str) -> Collection[str]:
    """Return the names of the fields of a definition, or of a mapping within it; of the file for the empty name."""
    schema = SCHEMA["$defs"][name] if name else SCHEMA
    for step in path:
        schema = schema["properties"][step]
    names: dict[str, Schema] = schema["properties"]
    return names.keys()
