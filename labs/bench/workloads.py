"""The named workloads: lengths, turns and waits of what people do with language models, and how answers are judged."""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, cycle
from math import exp
from random import Random
from typing import Any, Literal, NamedTuple

import orjson

from labs.benchmarks.fresh import STRIDE
from labs.benchmarks.skills import fresh_prompts
from labs.benchmarks.words import WORDS
from labs.simulation.arrival import Arrival
from labs.simulation.errors import OptionError

Check = Callable[[str, str], bool]
"""Returns True if an answer is right, by its text and its finish reason."""

CHAT, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"
POOL_WORDS = 50_000
NUM_SKILL_PROMPTS = 300  # different ones; then they repeat
CONTEXT_MARGIN = 0.95  # of the context, since lengths are estimates
P99_SIGMAS = 2.33


class Turn(NamedTuple):
    """A request that is sent `wait` seconds after the answer before it."""

    path: str
    body: dict[str, Any]
    output_tokens: int  # at most
    wait: float = 0.0
    check: Check | None = None


Session = Generator[Turn, str, None]
"""The turns of one session; each is yielded, and the text of its answer sent back."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A log-normal distribution."""

    median: float
    sigma: float = 0.0

    def draw(self, random: Random) -> float:
        return self.median * exp(random.gauss(0.0, self.sigma)) if self.sigma else self.median

    def tokens(self, random: Random) -> int:
        return max(1, round(self.draw(random)))

    @property
    def p99(self) -> float:
        return self.median * exp(P99_SIGMAS * self.sigma)

    def times(self, factor: float) -> "Lengths":
        return replace(self, median=max(1.0, self.median * factor))


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths in tokens, waits in seconds."""

    what: str
    prompt: Lengths
    output: Lengths
    kind: Literal["chat", "embeddings", "schema", "skills"] = "chat"
    shared: int = 0  # of a beginning that all prompts of the tenant have
    turns: tuple[int, int] = (1, 1)  # fewest and most
    more: Lengths = Lengths(1)  # of each further turn's message, such as a tool's result
    wait: Lengths = Lengths(0)
    service_tier: str = ""

    @property
    def repeats(self) -> bool:
        """True if prompts begin alike by intention."""
        return self.shared > 0 or self.turns[1] > 1 or self.kind == "skills"

    def fitted(self, context: int) -> "Workload":
        """Return the workload with lengths of which 99 in 100 sessions fit a context."""
        turns = self.turns[1]
        largest = self.shared + self.prompt.p99 + turns * self.output.p99 + (turns - 1) * self.more.p99
        factor = CONTEXT_MARGIN * context / largest
        if factor >= 1:
            return self
        lengths = {name: getattr(self, name).times(factor) for name in ("prompt", "output", "more")}
        return replace(self, shared=int(self.shared * factor), **lengths)


WORKLOADS = {
    "chat": Workload("short chats", Lengths(80, 0.8), Lengths(150, 0.7), shared=60),
    "rag": Workload("questions behind long documents", Lengths(3000, 0.4), Lengths(200, 0.5), shared=100),
    "summary": Workload(
        "summaries in batches", Lengths(1500, 0.6), Lengths(150, 0.4), service_tier="flex"
    ),
    "agent": Workload(
        "agents of 3 to 8 turns that wait for their tools", Lengths(150, 0.6), Lengths(60, 0.7),
        shared=400, turns=(3, 8), more=Lengths(200, 0.9), wait=Lengths(2.0, 1.0),
    ),
    "reasoning": Workload("short questions with long answers", Lengths(150, 0.6), Lengths(1200, 0.8)),
    "embeddings": Workload("texts to embed", Lengths(120, 0.8), Lengths(1), kind="embeddings"),
    "extract": Workload("answers by a JSON schema", Lengths(200, 0.6), Lengths(200), kind="schema"),
    "skills": Workload("what Sluice's embedded model can do", Lengths(20), Lengths(600), kind="skills"),
}  # fmt: skip

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["question", "complaint", "order"]},
        "urgent": {"type": "boolean"},
        "items": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["kind", "urgent", "items"],
    "additionalProperties": False,
}


class Prose:
    """Text of a wanted number of tokens, by what the server has counted."""

    def __init__(self, random: Random, tokens_per_word: float = 1.3, overhead: float = 0.0) -> None:
        """`overhead`: tokens of a prompt without words, such as a chat template's."""
        self.tokens_per_word, self.overhead = tokens_per_word, overhead
        words = random.choices(WORDS, k=POOL_WORDS)
        self._pool = " ".join(words)
        self._starts = [0, *accumulate(len(word) + 1 for word in words)]
        self._number = random.randrange(10**8)

    def fresh(self, tokens: float) -> str:
        """Return a prompt that begins as no other does."""
        self._number = (self._number + STRIDE) % 10**8
        return f"{self._number:08d} {self.named(self._number, tokens - self.overhead)}"

    def named(self, name: int, tokens: float) -> str:
        """Return the text of this name; the same for the same length."""
        count = max(1, min(POOL_WORDS // 2, round(tokens / self.tokens_per_word)))
        first = name * STRIDE % (POOL_WORDS - count)
        return self._pool[self._starts[first] : self._starts[first + count] - 1]


class Sessions:
    """Makes one tenant's sessions."""

    def __init__(
        self, workload: Workload, prose: Prose, random: Random, context: int, fields: Mapping[str, Any]
    ) -> None:
        """`fields`: of each request's body, `model` among them."""
        self.workload = workload.fitted(context)
        self.is_fitted = self.workload is not workload
        workload = self.workload
        self._prose, self._random, self._context, self._fields = prose, random, context, fields
        self._beginning = prose.named(random.randrange(10**6), workload.shared) if workload.shared else ""
        self._check = _schema_check() if workload.kind == "schema" else None
        self._skills = (
            cycle(fresh_prompts(NUM_SKILL_PROMPTS, random.randrange(10**6))) if workload.kind == "skills" else None
        )
        self.num_cut = 0  # prompts of a trace that the context does not hold

    def next(self) -> Session:
        kinds = {"chat": self._chat, "embeddings": self._embed, "schema": self._extract, "skills": self._skill}
        return kinds[self.workload.kind]()

    def of_trace(self, arrival: Arrival) -> Session:
        """A request with the lengths of a trace's, and as much of its beginning in common with others."""
        room = int(CONTEXT_MARGIN * self._context) - arrival.output_tokens
        tokens = min(arrival.prompt_tokens, max(1, room))
        self.num_cut += tokens < arrival.prompt_tokens
        content, known, parts = arrival.content, 0, list[str]()
        if content is not None and content.unit is not None:
            whole = min(tokens, content.length or tokens) // content.unit
            parts = [self._prose.named(name, content.unit) for name in content.ids[:whole]]
            known = len(parts) * content.unit
        parts.append(self._prose.fresh(tokens - known))
        yield self._turn([{"role": "user", "content": " ".join(parts)}], arrival.output_tokens)

    def _chat(self) -> Session:
        random, workload = self._random, self.workload
        messages = [{"role": "system", "content": self._beginning}] if self._beginning else []
        turns = random.randint(*workload.turns)
        text, wait = self._prose.fresh(self._bounded(workload.prompt.tokens(random))), 0.0
        for _ in range(turns):
            messages.append({"role": "user", "content": text})
            answer = yield self._turn(list(messages), workload.output.tokens(random), wait)
            messages.append({"role": "assistant", "content": answer})
            text = self._prose.fresh(workload.more.tokens(random))
            wait = workload.wait.draw(random)

    def _embed(self) -> Session:
        inputs = [self._prose.fresh(self._bounded(self.workload.prompt.tokens(self._random)))]
        yield Turn(EMBEDDINGS, {**self._fields, "input": inputs}, 0)

    def _extract(self) -> Session:
        text = self._prose.fresh(self._bounded(self.workload.prompt.tokens(self._random)))
        content = f"Extract kind, urgent and items as JSON: {text}"
        turn = self._turn([{"role": "user", "content": content}], self.workload.output.tokens(self._random))
        schema = {"type": "json_schema", "json_schema": {"name": "note", "strict": True, "schema": SCHEMA}}
        yield turn._replace(body={**turn.body, "response_format": schema}, check=self._check)

    def _skill(self) -> Session:
        assert self._skills is not None
        example = next(self._skills)
        turn = self._turn([{"role": "user", "content": example.prompt}], self.workload.output.tokens(self._random))
        body = {"temperature": 0} | turn.body
        yield turn._replace(body=body, check=lambda text, finish: example.is_right(text, ended=finish == "stop"))

    def _turn(self, messages: list[dict[str, str]], output_tokens: int, wait: float = 0.0) -> Turn:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        return Turn(
            CHAT, {"messages": messages, "max_tokens": output_tokens, **options, **self._fields}, output_tokens, wait
        )

    def _bounded(self, tokens: int) -> int:
        room = CONTEXT_MARGIN * self._context - self.workload.shared - self.workload.output.p99
        return max(1, min(tokens, int(room)))


def _schema_check() -> Check:
    try:
        from jsonschema import Draft202012Validator  # noqa: PLC0415 - of the extra `labs`
    except ImportError:
        raise OptionError("workload", "extract", "needs the package jsonschema: pip install jsonschema") from None
    validator = Draft202012Validator(SCHEMA)

    def is_valid(text: str, _: str) -> bool:
        try:
            return bool(validator.is_valid(orjson.loads(text)))
        except orjson.JSONDecodeError:
            return False

    return is_valid
