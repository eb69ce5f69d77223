"""The requests of a workload: times, lengths and tenants."""

from collections.abc import Callable
from itertools import zip_longest
from math import inf
from typing import NamedTuple

from backend.sampling_params import SamplingParams
from backend.scheduler.sequence import PromptRequest, Sequence
from labs.simulation.contents import Content
from labs.simulation.sampled_tokens import END

_NEVER, _AT_END = frozenset[int](), frozenset((END,))
_SAMPLING = SamplingParams()


class Turn(NamedTuple):
    """A session's next request, sent after an answer: the whole conversation so far, and more."""

    wait: float  # seconds after the end of the previous answer, as for a tool to return
    more_tokens: int  # of its prompt
    output_tokens: int
    expects: float | None = None  # seconds from its answer to its client's announced next turn


class Arrival(NamedTuple):
    """One request of a workload. Times are in seconds from the workload's start, lengths in tokens."""

    time: float
    prompt_tokens: int
    output_tokens: int  # generated unless it is ended earlier
    session: int = 0  # shared by a conversation's requests; hashed into tenants
    tenant: str = ""  # empty: not assigned yet
    priority_class: int = 0
    max_tokens: int = 0  # declared; 0: by the `Workload`, else its output length
    patience: float = inf  # it leaves without a token after these seconds
    deadline: float | None = None  # declared seconds to its first token
    done_within: float | None = None  # the same for its last token
    attempt: int = 0  # retries before it
    interval: float | None = None  # declared seconds between tokens
    key: str | None = None  # id of the API key that it came with
    service_tier: str | None = None  # requested; None: none, or unknown
    asked_class: int | None = None  # requested class, by number; capped at its tenant's
    is_declared: bool = True  # False: `max_tokens` is the rest of the context
    body_bytes: int = 0
    refused_by: str | None = None  # the limit that refused it when recorded; kept unless limits are simulated
    more_prompts: tuple[tuple[int, int, int], ...] = ()  # of the same request: lengths, answers' lengths, max_tokens
    content: Content | None = None  # of its prompt and its answer; None: unknown, and shared with no other
    more_contents: tuple[Content | None, ...] = ()  # of its other prompts
    begins: tuple[int, ...] = ()  # the first tokens of its prompt, for length predictors
    num_answers: int = 1  # to each prompt; the prompt counts once
    group: int | None = None  # number of its prompt, if it has several answers
    expects: float | None = None  # seconds from its answer to its client's announced next turn
    turns: tuple[Turn, ...] = ()  # further turns of its session, sent one after another
    began: float | None = None  # arrival of its session's first turn, if this is a later one

    @property
    def declared_tokens(self) -> int:
        return max(self.max_tokens, self.output_tokens)

    @property
    def most_tokens(self) -> int:
        """The maximum of prompt and answer tokens by the request's own declaration."""
        return self.prompt_tokens + self.declared_tokens

    @property
    def prompts(self) -> "tuple[Arrival, ...]":
        """The prompts of the request, each as a request of its own."""
        if not self.more_prompts:
            return (self,)
        several = self.num_answers > 1
        alone = self._replace(more_prompts=(), more_contents=(), group=0 if several else None)
        others = [
            alone._replace(
                prompt_tokens=prompt,
                output_tokens=output,
                max_tokens=most,
                content=content,
                group=number // self.num_answers if several else None,
            )
            for number, ((prompt, output, most), content) in enumerate(
                zip_longest(self.more_prompts, self.more_contents), 1
            )
        ]
        return (alone, *others)

    def next_turn(self, now: float) -> "Arrival | None":
        """The session's next request after an answer at `now`; None if it was the last."""
        if not self.turns:
            return None
        turn, *rest = self.turns
        return self._replace(
            time=now + turn.wait,
            prompt_tokens=self.prompt_tokens + self.output_tokens + turn.more_tokens,
            output_tokens=turn.output_tokens,
            expects=turn.expects,
            turns=tuple(rest),
            began=self.time if self.began is None else self.began,
            attempt=0,
        )

    def repeated(self, repetition: int) -> "Arrival":
        """The same request in a repetition of the trace, which shares no content with the others."""
        return self._with_contents(lambda content: content._replace(repetition=repetition))

    @property
    def in_no_scope(self) -> "Arrival":
        """The same request, whose content is shared with its tenant's, not within its recorded scope."""
        return self._with_contents(lambda content: content._replace(scope=None))

    def _with_contents(self, change: Callable[[Content], Content]) -> "Arrival":
        contents = [one and change(one) for one in (self.content, *self.more_contents)]
        return self._replace(content=contents[0], more_contents=tuple(contents[1:]))

    @property
    def alike(self) -> "Arrival":
        """Another request of the same lengths, without shared content."""
        return self._replace(content=None, more_contents=())


class ClassTarget(NamedTuple):
    """The latencies promised by a class, in seconds; None: none."""

    first_token: float | None = None
    interval: float | None = None  # between tokens
    refuses: bool = False  # requests expected to be late for the first token


NO_TARGET = ClassTarget()


def sequence_of(number: int, arrival: Arrival, now: float, target: ClassTarget) -> Sequence:
    """Makes the sequence of an arrival.

    Its tokens are 0, except the ones it `begins` with. Its seed is the length of its answer, which only the device
    reads.
    """
    declared = arrival.declared_tokens
    ends = _AT_END if declared > arrival.output_tokens else _NEVER
    prompt = [*arrival.begins, *[0] * (arrival.prompt_tokens - len(arrival.begins))][: arrival.prompt_tokens]
    request = PromptRequest(
        str(number),
        arrival.tenant,
        prompt,
        _SAMPLING,
        declared,
        arrival.output_tokens,
        ends,
        priority_class=arrival.priority_class,
        token_interval=_tighter(arrival.interval, target.interval),
        first_token_target=target.first_token,
        first_token_by=min(deadlines) if (deadlines := _deadlines(arrival, now, target)) else None,
        done_by=None if arrival.done_within is None else now + arrival.done_within,
        body_bytes=arrival.body_bytes,
        expects_followup=arrival.expects,
    )
    return Sequence(request)


def _tighter(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else min(one, other)


def _deadlines(arrival: Arrival, now: float, target: ClassTarget) -> list[float]:
    own = target.first_token if target.refuses else None
    return [now + seconds for seconds in (arrival.deadline, own) if seconds is not None]
