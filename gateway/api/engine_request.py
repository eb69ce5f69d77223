"""The engine's part of one HTTP request: plain values, which may cross to another process."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from admission.request import JudgedPrompt, JudgedRequest
from backend.adapter import Adapter
from backend.sampling_params import SamplingParams
from backend.scheduler.forking import group_by_prompt
from backend.scheduler.sequence import PromptRequest, Sequence
from gateway.replica.fleet_secret import UNKNOWN, Beginnings
from quotas.reservation import Ask, Attempt


@dataclass(frozen=True, slots=True)
class ClientDeadlines:
    """The deadlines of a request, in seconds from its arrival; inf where the client sets none."""

    first_token: float = inf
    last_token: float = inf
    interval: float = inf  # between two tokens
    is_relative: bool = True  # the deadline counts from each attempt, so that a retry may meet it


@dataclass(slots=True)
class EngineRequest:
    """A request to generate, checked, tokenized and frozen. Moments are in seconds of the engine's clock."""

    id: str  # of the response
    tenant: str
    key: str  # id of the API key
    prompts: list[list[int]]  # token ids; `num_answers` of them in a row are one list
    max_tokens: list[int]  # of the answer to each prompt
    sampling: SamplingParams  # `max_tokens` is None if the client set none
    service_tier: str | None
    service_class: str
    priority_class: int
    token_interval: float | None
    first_token_target: float | None
    first_token_by: float | None
    done_by: float | None
    deadlines: ClientDeadlines
    body_bytes: int
    streams: bool = True  # the client reads tokens as they come, not only the complete answer
    may_stop: bool = False  # a stop string may end it, unknown to the engine
    may_reason: bool = False  # its reader counts the tokens of reasoning, by which it is charged
    cache_salt: str | None = None  # blocks are shared only with requests of the same salt
    num_answers: int = 1  # to each prompt; the prompt counts once
    expects_followup: float | None = None  # seconds from the answer to the client's announced next turn
    beginnings: Beginnings = UNKNOWN  # of its prompt, where a router has sent it
    attempt: Attempt | None = None  # set by a router, which may send a request to several replicas
    usage_row: str | None = None  # of the ledger, in which its use is booked
    adapter: str | None = None  # its name; None: the model alone
    model: str | None = None  # its name in the API; None: the first

    def sequences(
        self,
        end_tokens: frozenset[int],
        draw_seed: Callable[[], int],
        adapter: Adapter | None = None,
        number: int = 0,
    ) -> list[Sequence]:
        """A sequence for each prompt. `end_tokens` and `number` are the model's; `draw_seed` supplies a seed if the
        request has none. Of several answers to a prompt, each has its predecessor's seed plus one. `adapter` is the
        named one.
        """
        sampling, num_answers = self.sampling, self.num_answers
        ends = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ends |= end_tokens
        requests = (
            PromptRequest(
                id=f"{self.id}-{index}",
                tenant=self.tenant,
                prompt=prompt,
                sampling=sampling,
                max_tokens=max_tokens,
                end_tokens=ends,
                seed=draw_seed() if sampling.seed is None else _later(sampling.seed, index % num_answers),
                priority_class=self.priority_class,
                token_interval=self.token_interval,
                first_token_target=self.first_token_target,
                first_token_by=self.first_token_by,
                done_by=self.done_by,
                body_bytes=self.body_bytes,
                expects_followup=self.expects_followup,
                grammar=None if sampling.grammar is None else sampling.grammar.name,
                adapter=adapter,
                model=number,
            )
            for index, (prompt, max_tokens) in enumerate(zip(self.prompts, self.max_tokens, strict=True))
        )
        sequences = list(map(Sequence, requests))
        if len(sequences) > 1:
            group_by_prompt(sequences)
        return sequences

    def as_recorded(self, refusal: str | None = None) -> JudgedRequest:
        """The request as the event log records it, with the name of its refusal, if any."""
        deadlines, is_declared = self.deadlines, self.sampling.max_tokens is not None
        patience = deadlines.first_token, deadlines.last_token, deadlines.interval
        first_token, last_token, interval = [seconds if seconds < inf else None for seconds in patience]
        return JudgedRequest(
            self.id,
            self.tenant,
            self.key,
            self.service_tier,
            self.body_bytes,
            first_token,
            last_token,
            interval,
            tuple(
                [
                    JudgedPrompt(len(prompt), most, is_declared, index % self.num_answers > 0)
                    for index, (prompt, most) in enumerate(zip(self.prompts, self.max_tokens, strict=True))
                ]
            ),
            refusal,
        )


def ask_of(
    sequences: list[Sequence], num_answers: int = 1, attempt: Attempt | None = None, row: str | None = None
) -> Ask:
    """The maximum that one request's sequences may use; each prompt has `num_answers` consecutive ones.

    A line of a batch counts as no request: it holds up none of its tenant.
    """
    num_prompt_tokens = sum([one.num_prompt_tokens for one in sequences[::num_answers]])
    num_output_tokens = sum([one.token_limit - one.num_prompt_tokens for one in sequences])
    return Ask(0 if sequences[0].is_spare else 1, num_prompt_tokens, num_output_tokens, attempt=attempt, row=row)


def _later(seed: int, count: int) -> int:
    """Return `seed + count`, wrapped to 64 bits with a sign."""
    return (seed + count + 2**63) % 2**64 - 2**63
