"""The explanation of one request, from an event log: why it waited, was refused, or was preempted."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from admission.core import Overload
from admission.event_logs.event_log import check_version, reading, step_times_of
from admission.event_logs.numbers import in_seconds

REASONS = {
    "batch": "the batch had to drain",
    "peers": "it was to be computed beside others, and fewer were there",
    "release": "memory of preempted sequences was on its way back",
    "budget": "the step's token budget was full",
    "slots": "max_num_seqs sequences were running",
    "memory": "KV memory, or what those running may still need of it, had no room",
    "model": "the step was another model's turn",
    "adapter": "the step brought other adapters to the device",
    "allowance": "its tenant held as much KV memory as its limit allows",
    "tokens": "its tenant's token limit had no more for it yet",
}
BEHIND_PREFIX = "behind others that are due earlier, because "  # followed by the obstacle of the head of the queue
PAUSED_PREFIX = "paused: "  # followed by the limit that a running sequence has met
MAX_TENANTS_NAMED = 3  # of requests due earlier


class _OpenRequest(NamedTuple):
    """An open request, with the facts that explain its order."""

    request: str
    tenant: str
    has_deadline: bool


@dataclass(slots=True)
class _SequenceHistory:
    """The history of one sequence."""

    name: str
    tenant: str
    arrived: float
    lines: list[str] = field(default_factory=list)
    waiting_since: float | None = None
    waits: dict[str, float] = field(default_factory=dict)  # seconds by reason
    ahead: dict[str, dict[_OpenRequest, None]] = field(
        default_factory=dict
    )  # by reason, the requests served first meanwhile
    has_deadline: bool = False
    over: bool = False

    def say(self, now: float, text: str) -> None:
        self.lines.append(f"{now - self.arrived:9.3f} s  {text}")

    def add_wait(self, reason: str, ahead: Iterable[_OpenRequest], seconds: float) -> None:
        self.waits[reason] = self.waits.get(reason, 0.0) + seconds
        self.ahead.setdefault(reason, {}).update(dict.fromkeys(ahead))

    def end(self, now: float, how: str) -> None:
        if self.over:
            return
        if self.waits:
            self.waited(now, "left the queue after waiting")
        self.over = True
        self.say(now, how)

    def admitted(self, now: float) -> None:
        if self.waiting_since is not None:
            self.waited(now, "admitted after waiting")

    def waited(self, now: float, what: str) -> None:
        """Append a line with the sequence's wait until now, by reason."""
        assert self.waiting_since is not None
        self.say(now, f"{what} {now - self.waiting_since:.3f} s")
        for reason, seconds in sorted(self.waits.items(), key=lambda item: -item[1]):
            how = "due earlier" if reason.startswith(BEHIND_PREFIX) else "served first"
            told = [*self._before(self.ahead[reason], how), reason.removeprefix(BEHIND_PREFIX)]
            self.lines.append(f"{'':13}{seconds:.3f} s: {'; '.join(filter(None, told))}")
        self.waiting_since, self.waits, self.ahead = None, {}, {}

    def _before(self, ahead: Iterable[_OpenRequest], how: str) -> Iterator[str]:
        """Yield the counts of requests that went first, and why."""
        of_others, of_its_tenant, has_siblings = Counter[str](), 0, False
        for one in ahead:
            if one.request == request_of(self.name):
                has_siblings = True
            elif one.tenant != self.tenant:
                of_others[one.tenant] += 1
            elif one.has_deadline or self.has_deadline:
                of_others["its own tenant"] += 1
            else:
                of_its_tenant += 1
        if of_others:
            yield f"{_by_tenant(of_others)} {'was' if of_others.total() == 1 else 'were'} {how}"
        if of_its_tenant:
            yield f"{_requests(of_its_tenant)} of its own tenant went first: older, shorter, or still in time"
        if has_siblings:
            yield "other answers to its request went first"


def request_of(name: str) -> str:
    """Return the request's id of a sequence's name."""
    request, _, index = name.rpartition("-")
    return request if index.isdecimal() else name


def _requests(count: int) -> str:
    return f"{count} request{'s' if count > 1 else ''}"


def _by_tenant(count_by_tenant: Counter[str]) -> str:
    named = count_by_tenant.most_common(MAX_TENANTS_NAMED)
    (tenant, count), *others = named
    each = [f"{_requests(count)} of {tenant}", *[f"{count} of {tenant}" for tenant, count in others]]
    if rest := count_by_tenant.total() - sum(count for _, count in named):
        each.append(f"{rest} of {len(count_by_tenant) - len(named)} more tenants")
    return ", ".join(each)


def explain(lines: Iterable[str], request: str) -> list[str]:
    """Return the story of `request`, the id of a response or of one of its sequences; empty if the log lacks it.

    Raises `LogError`.
    """
    reader = _LogReader(request)
    for number, line in enumerate(lines, 1):
        with reading(number):
            reader.read(json.loads(line))
    reader.close()
    return [text for history in reader.histories.values() for text in (history.name, *history.lines)]


class _LogReader:
    """Reads a log entry by entry, and keeps the histories of the asked request."""

    def __init__(self, request: str) -> None:
        self.histories: dict[str, _SequenceHistory] = {}
        self._request = request
        self._given_up = _GIVEN_UP
        self._previous = 0.0  # the time of the last entry
        # tenants that the queue passes over, each with the limit of its own that it has met
        self._held: dict[str, str] = {}
        self._prompts: dict[str, int] = {}  # lengths in tokens
        self._asked_for: dict[str, _OpenRequest] = {}  # open sequences
        self._not_begun: set[str] = set()
        # requests that began with the last plan, or its waiting head; and the ones of them that took a slot
        self._ahead: dict[str, _OpenRequest] = {}
        self._overtook: set[str] = set()
        self._overtakers: set[str] = set()  # open sequences that took a slot ahead of earlier due ones
        self._engine: dict[str, Any] = {}  # its settings
        self._until_planned = "until the next step was planned"
        self._why: list[str] | None = None  # the queue's obstacle by the last plan, and its head
        self._readers: dict[str, Callable[..., None]] = {
            "request": self._asked,
            "arrive": self._arrive,
            "plan": self._plan,
            "done": self._done,
            "lost": self._lost,
            "finish": self._finish,
        }

    def read(self, entry: list[Any]) -> None:
        kind, *said = entry
        if kind == "log":
            self._begin(entry)
        if kind in self._readers:
            now = in_seconds(said[0])
            self._wait_until(now)
            self._readers[kind](now, *said[1:])

    def close(self) -> None:
        """Finish the histories of sequences still open at the end of the log."""
        for history in self._open():
            if history.waiting_since is None:
                history.say(self._previous, "had not ended when the log did")
            else:
                history.waited(self._previous, "still waiting when the log ended, for")

    def _begin(self, entry: list[Any]) -> None:
        check_version(entry)
        self._engine = entry[2]
        if len(step_times_of(entry)) > 1:
            self._until_planned = "until the next step of its model was planned"
        if entry[3]["overload"] == Overload.CONTROLLED_DELAY:
            self._given_up = _GIVEN_UP | {"expired": "given up: the queue had stood for too long"}

    def _wait_until(self, now: float) -> None:
        """Add the time since the last entry to the reason of the last plan."""
        for history in self._open():
            if history.waiting_since is not None and now > self._previous:
                self._wait(history, now - self._previous)
        self._previous = now

    def _asked(self, now: float, name: str, tenant: str, *rest: Any) -> None:
        """Note a request that was refused before it reached the core; others are noted when they arrive."""
        *_, prompts, refusal = rest
        if refusal is None or name != self._request:
            return
        history = self.histories[name] = _SequenceHistory(name, tenant, now)
        size, most = (sum(prompt[column] for prompt in prompts) for column in (0, 1))
        what = f"{size} prompt tokens, max_tokens {most} in all" if prompts else "and was not read"
        history.say(now, f"asked: tenant {tenant}, {what}")
        history.end(now, f"refused before it came to the queue: {refusal}")

    def _arrive(
        self,
        now: float,
        name: str,
        tenant: str,
        prompt: int,
        most: int,
        allowed: int,
        level: int,
        *rest: Any,
    ) -> None:
        _, _, first_by, done_by, _, first, last, refusal, *_, grammar = rest
        if refusal is None:
            self._asked_for[name] = _OpenRequest(request_of(name), tenant, first_by is not None)
            self._not_begun.add(name)
        if self._request not in (name, request_of(name)):
            return
        history = _SequenceHistory(name, tenant, now, waiting_since=now, has_deadline=first_by is not None)
        self.histories[name] = history
        history.say(now, f"arrived: tenant {tenant}, class {level}, {prompt} prompt tokens, max_tokens {most}")
        self._prompts[name] = prompt
        for what, by in (("first", first_by), ("last", done_by)):
            if by is not None:
                left = f"{by - now:.{3 if by - now >= 0.001 else 6}f} s"
                history.say(now, f"its {what} token is of no use {f'after {left}' if by > now else 'any more'}")
        if grammar is not None:
            history.say(now, f"its answer has to match the grammar {grammar}")
        if first is not None:
            history.say(now, f"first token expected within {first:.3f} s, the last within {last:.3f} s")
        if refusal:
            history.end(now, f"refused: {refusal}")

    def _plan(
        self,
        now: float,
        step: int | None,
        _: int,
        __: int,
        chunks: list[list[Any]],
        preempted: list[str],
        why: Any,
        held: dict[str, str] | None,
        given_up: list[list[str]],
        cached: dict[str, Any] | None = None,
    ) -> None:
        cached = cached or {}
        drafted: dict[str, int] = cached.get("drafted", {})
        self._held = self._held if held is None else held
        why_given_up = dict(given_up)
        began = [name for name, _ in chunks if name in self._not_begun]
        self._not_begun.difference_update(began, cached.get("forked", ()))
        if why is not None and len(why) > 2:
            self._overtakers.add(why[1])
        ahead = began if why is None else [*began, why[1]]
        self._ahead = {name: self._asked_for[name] for name in ahead if name in self._asked_for}
        self._overtook = self._overtakers.intersection(ahead)
        self._forget(why_given_up)
        for history in self._open():
            if history.name in why_given_up:
                history.end(now, self._given_up[why_given_up[history.name]])
                continue
            if blocks := cached.get("found", {}).get(history.name):
                history.admitted(now)
                history.say(now, self._found(history.name, blocks))
            if leader := cached.get("forked", {}).get(history.name):
                history.admitted(now)
                history.say(
                    now, f"starts from its prompt, which {leader} computes in step {step} for all answers to it"
                )
            for name, length in chunks:
                if name == history.name and length != 1 + drafted.get(name, -1):
                    history.admitted(now)
                    history.say(now, f"prefill of {length} tokens in step {step}{_evicted(cached)}")
            if history.name in preempted:
                history.say(now, "preempted: its slot or memory was needed; what is not cached of it is computed again")
                history.waiting_since = now
        self._why = why

    def _wait(self, history: _SequenceHistory, seconds: float) -> None:
        """Add waiting time to the requests that began with the last plan, or else to the plan's obstacle."""
        obstacle, limit = "" if self._why is None else REASONS[self._why[0]], self._held.get(history.tenant)
        ahead = {name: asked for name, asked in self._ahead.items() if name != history.name}
        due_earlier = [asked for name, asked in ahead.items() if name not in self._overtook]
        if limit is not None:
            history.add_wait(REASONS[limit], (), seconds)
        elif due_earlier:
            history.add_wait(BEHIND_PREFIX + obstacle, due_earlier, seconds)
        elif ahead:
            history.add_wait(REASONS["slots"], ahead.values(), seconds)
        else:
            history.add_wait(obstacle or self._until_planned, (), seconds)

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            self._asked_for.pop(name, None)
            self._not_begun.discard(name)
            self._overtakers.discard(name)

    def _found(self, name: str, blocks: int) -> str:
        """Return the text for a prefix hit; a preempted sequence may hit blocks of its output too."""
        tokens, prompt = blocks * self._engine["block_size"], self._prompts[name]
        return f"of its {prompt} prompt tokens {min(tokens, prompt)} were cached, and are not computed"

    def _done(self, now: float, _: int, __: float, stopped: list[str], full: list[str], *more: Any) -> None:
        self._forget([*stopped, *full])
        jumped = dict(more[1]) if len(more) > 1 and isinstance(more[1], list) else {}
        for history in self._open():
            if (count := jumped.get(history.name)) is not None:
                or_drafted = ", or that were drafted," if "speculate" in self._engine else ""
                history.say(now, f"{count} tokens that its grammar forced{or_drafted} came with another")
            if history.name in stopped:
                history.end(now, "ended by an end token")
            elif history.name in full:
                history.end(now, "ended: it has as many tokens as it may")

    def _lost(self, now: float, step: int, preempted: list[str], *_: Any) -> None:
        for history in self._open():
            if history.name in preempted:
                history.say(now, f"preempted: the device had no memory for step {step}; it will be computed again")
                history.waiting_since = now

    def _finish(self, now: float, name: str, reason: str, *_: Any) -> None:
        self._forget([name])
        if name in self.histories:
            self.histories[name].end(now, _ENDINGS.get(reason, reason))

    def _open(self) -> Iterator[_SequenceHistory]:
        return (history for history in self.histories.values() if not history.over)


_ENDINGS = {
    "cancelled": "cancelled: its client left, or an operator or the gateway ended it",
    "stop": "ended by a stop string",
}
_GIVEN_UP = {
    "expired": "given up: its deadline had passed, or could not be met any more",
    "preempted": "ended: it lost its memory as often as it may, and no other sequence could give any",
}


def _evicted(cached: dict[str, Any]) -> str:
    """Return the text for evictions since the last plan that reported any."""
    if "evicted" not in cached:
        return ""
    return f"; {cached['evicted']} cached blocks were given up for memory, {cached['idle']} idle ones are left"
