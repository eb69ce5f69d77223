"""Random calls about what the server stores: responses, also in the background, conversations, files and batches; and
about what it encodes: embeddings, scores and rankings.

A call is valid, or one of its places is not: its id is unknown, another tenant's or malformed, its body has other
values, its query makes no sense. Every answer is a 200 or a typed error, and has nothing of the other tenant's.
"""

import json
import re
from collections import defaultdict
from copy import deepcopy
from random import Random
from typing import Any, NamedTuple

import httpx

from scripts import fuzz_dialects

Json = dict[str, Any]

SECRET = "the gardener's third key"  # in all that the other tenant has stored
MAX_KNOWN = 200  # ids of a kind that are remembered
ODD_IDS = ["x", "resp_1", "..%2f..", "%00", "conv_" + "g" * 48, "a" * 3000, "resp_" + "0" * 48, "日", "%ff", "a b", "*"]
QUERIES = [
    "limit=1", "limit=0", "limit=99999999999999999999", "limit=x", "limit=²", "after=x", "after=", "order=asc",
    "order=up", "include[]=x", "purpose=batch", "purpose=x", "stream=true", "stream=true&starting_after=2",
    "stream=true&starting_after=-7", "stream=true&starting_after=999999999999", "stream=maybe", "stream=true&stream=x",
]  # fmt: skip
PATHS = {  # of each kind of object: paths below its id, and the methods of each
    "response": [("", "GET"), ("", "GET"), ("", "DELETE"), ("/input_items", "GET"), ("/cancel", "POST")],
    "conversation": [
        ("", "GET"), ("", "POST"), ("", "DELETE"), ("/items", "GET"), ("/items", "POST"), ("/items/{item}", "GET"),
        ("/items/{item}", "DELETE"),
    ],
    "file": [("", "GET"), ("", "DELETE"), ("/content", "GET")],
    "batch": [("", "GET"), ("/cancel", "POST")],
}  # fmt: skip
ROOTS = {"response": "responses", "conversation": "conversations", "file": "files", "batch": "batches"}
ENCODINGS: list[tuple[str, str, Json]] = [  # path, field of its texts, and other fields
    ("/v1/embeddings", "input", {}), ("/v1/score", "text_2", {"text_1": "1 2"}),
    ("/v2/rerank", "documents", {"query": "3"}),
]  # fmt: skip
TEXTS: list[Any] = [
    "1 2 3", ["7", ""], ["1 2"] * 40, ["1"] * 2049, [5, 6], [[5], [6, 7]], [3000], "[SEP] \0 日", "1 " * 600,
    [{"text": "4"}], [], [[]], ["a", [5]], 7,
]  # fmt: skip
ENCODED_FIELDS: dict[str, list[Any]] = {
    "encoding_format": ["float", "base64", "int8"], "dimensions": [1, 384, 385, 0, None], "top_n": [1, 9, 0],
    "user": ["u", 1], "truncate_prompt_tokens": [-1, 1, 0, 10**9], "return_documents": [True, False],
}  # fmt: skip
METADATA: list[Any] = [None, {}, {"a": "b"}, {"a": 1}, {"a" * 65: "b"}, {str(n): "x" for n in range(17)}, [], "x"]
ERROR_STATUSES = {400, 404, 405, 413, 429, 503}


class StoredCall(NamedTuple):
    """One call; `makes` is the kind of object that a 200 has made."""

    method: str
    path: str
    body: Any = None  # of JSON
    form: dict[str, Any] | None = None  # of an upload
    makes: str | None = None
    is_foreign: bool = False  # it names what another tenant has
    encodes: str | None = None  # the field with its texts


class StoredCalls:
    """Makes calls, and remembers what they made."""

    def __init__(self, random: Random, foreign: dict[str, str]) -> None:
        """`foreign`: an id of each kind, of another tenant."""
        self._random, self._foreign = random, foreign
        self._known: defaultdict[str, list[str]] = defaultdict(list)

    def next(self) -> StoredCall:
        match self._random.randrange(11):
            case 0 | 1:
                return self._response()
            case 2:
                return StoredCall(
                    "POST", "/v1/conversations", self._mutated(self._conversation()), makes="conversation"
                )
            case 3:
                return self._upload()
            case 4:
                return self._batch()
            case 5 | 6:
                return self._random.choice([self._other, self._encoding])()
        return self._of_one()

    def judge(self, call: StoredCall, reply: httpx.Response) -> None:
        assert SECRET not in reply.text, "another tenant's"
        if reply.status_code == 200:
            assert not call.is_foreign, "another tenant's id is known"
            if call.encodes is not None:
                _judge_encoded(call, reply.json())
            if call.makes and reply.headers["content-type"].startswith("application/json"):
                found = reply.json()
                self._made(call.makes, found["id"])
                if call.makes == "response" and found["output"]:
                    self._made("item", found["output"][0]["id"])
            return
        assert reply.status_code in ERROR_STATUSES, reply.status_code
        error = reply.json()["error"]
        assert error["message"].endswith(".") and {"type", "param", "code"} <= error.keys(), error
        assert not re.search(r"pydantic|Input should|Traceback|redis", error["message"]), error
        assert (
            reply.status_code not in (429, 503) or reply.headers.get("retry-after") or "x-should-retry" in reply.headers
        )

    def _made(self, kind: str, name: str) -> None:
        self._known[kind] = [*self._known[kind][-MAX_KNOWN:], name]

    def _response(self) -> StoredCall:
        random, body = self._random, fuzz_dialects.response(self._random)
        body |= random.choice([{}, {"background": True}, {"background": True}, {"store": False}])
        conversation = self._id("conversation")
        before = {"conversation": conversation}, {"conversation": {"id": conversation}}
        body |= random.choice([{}, *before, {"previous_response_id": self._id("response")}])
        if isinstance(body["input"], list) and random.random() < 0.3:
            body["input"].append({"type": "item_reference", "id": self._id("item")})
        text = json.dumps(self._mutated(body))
        is_foreign = any(name in text for name in self._foreign.values())
        return StoredCall("POST", "/v1/responses", body, makes="response", is_foreign=is_foreign)

    def _conversation(self) -> Json:
        random = self._random
        items = [fuzz_dialects.item(random) for _ in range(random.choice([0, 1, 1, 3, 21]))]
        return {"items": items, "metadata": random.choice(METADATA)}

    def _upload(self) -> StoredCall:
        random = self._random
        body = {"model": "embedded", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
        lines = [
            {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": dict(body)}
            for number in range(random.choice([1, 2, 5]))
        ]
        if random.random() < 0.4:
            fuzz_dialects.mutate(random, random.choice(lines))
        text = b"\n".join(json.dumps(line).encode() for line in lines)
        text = random.choice([text, text, text, b"", b"\x00\xff" * 300, text[: len(text) // 2]])
        purpose = random.choice(["batch", "batch", "batch", "batch", "fine-tune", ""])
        form = {"files": {"file": ("x.jsonl", text)}, "data": {"purpose": purpose}}
        return StoredCall("POST", "/v1/files", form=form, makes="file")

    def _batch(self) -> StoredCall:
        body: Json = {"input_file_id": self._id("file"), "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        body |= self._random.choice([{}, {"metadata": self._random.choice(METADATA)}])
        is_foreign = self._mutated(body).get("input_file_id") == self._foreign["file"]
        return StoredCall("POST", "/v1/batches", body, makes="batch", is_foreign=is_foreign)

    def _other(self) -> StoredCall:
        random = self._random
        path = random.choice(["/v1/files", "/v1/batches", "/v1/responses", "/v1/conversations"])
        query = random.choice(QUERIES)
        return StoredCall(random.choice(["GET", "GET", "GET", "PUT", "DELETE"]), f"{path}?{query}")

    def _encoding(self) -> StoredCall:
        random = self._random
        path, field, body = random.choice(ENCODINGS)
        model = random.choice([*["encoder"] * 8, "embedded", "e"])
        body = {"model": model, **body, field: deepcopy(random.choice(TEXTS))}
        for name in random.sample([*ENCODED_FIELDS], random.choice([0, 0, 1, 2])):
            body[name] = random.choice(ENCODED_FIELDS[name])
        return StoredCall("POST", path, self._mutated(body), encodes=field)

    def _of_one(self) -> StoredCall:
        """A call about one object."""
        random = self._random
        kind = random.choice([*PATHS])
        below, method = random.choice(PATHS[kind])
        name = self._id(kind)
        path = f"/v1/{ROOTS[kind]}/{name}{below.format(item=self._id('item'))}"
        if random.random() < 0.3:
            path += "?" + random.choice(QUERIES)
        body: Any = None
        if kind == "conversation" and method == "POST":
            body = self._mutated({"metadata": random.choice(METADATA)} if not below else self._conversation())
        if random.random() < 0.03:
            method = random.choice(["PUT", "PATCH", "POST", "DELETE"])
        return StoredCall(method, path, body, is_foreign=name == self._foreign.get(kind))

    def _id(self, kind: str) -> str:
        chance, known = self._random.random(), self._known[kind]
        if chance < 0.7 and known:
            return self._random.choice(known)
        if chance < 0.85 and kind in self._foreign:
            return self._foreign[kind]
        return self._random.choice(ODD_IDS)

    def _mutated(self, body: Json) -> Json:
        if self._random.random() < 0.3:
            fuzz_dialects.mutate(self._random, body)
        return body


def _judge_encoded(call: StoredCall, found: Json) -> None:
    """Each text has its vector or score; of a ranking the best ones do."""
    given = call.body[call.encodes]
    count = 1 if isinstance(given, str) or type(given[0]) is int else len(given)
    rows = found["data"] if "data" in found else found["results"]
    most = min(count, call.body.get("top_n") or count) if "results" in found else count
    places = {row["index"] for row in rows}
    assert len(places) == len(rows) == most and places <= {*range(count)}, "another number of vectors or scores"


def store_secrets(url: str, key: str) -> dict[str, str]:
    """Have another tenant store one object of each kind, and return their ids."""
    headers = {"authorization": f"Bearer {key}"}
    text = [{"role": "user", "content": SECRET}]
    body = {"model": "embedded", "messages": text}
    line = {"custom_id": SECRET, "method": "POST", "url": "/v1/chat/completions", "body": body}
    with httpx.Client(base_url=f"{url}/v1", headers=headers, timeout=60) as client:
        response = client.post("/responses", json={"model": "embedded", "input": text, "max_output_tokens": 2}).json()
        conversation = client.post("/conversations", json={"items": text, "metadata": {"a": SECRET}}).json()["id"]
        file = client.post("/files", files={"file": json.dumps(line).encode()}, data={"purpose": "batch"}).json()["id"]
        asked = {"input_file_id": file, "endpoint": line["url"], "completion_window": "24h", "metadata": {"a": SECRET}}
        batch = client.post("/batches", json=asked).json()["id"]
    ids = {"response": response["id"], "item": response["output"][0]["id"]}
    return ids | {"conversation": conversation, "file": file, "batch": batch}
